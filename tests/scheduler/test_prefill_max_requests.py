"""The number of prompts that one step may compute."""

from __future__ import annotations

import pytest

from rota.core.config import SchedulerConfig
from rota.core.errors import ConfigError
from rota.core.policy_config import PolicyConfig
from tests.scheduler.stage import Stage, seated


def stage_of(most: int | None, chunk: int = 64, **fields) -> Stage:
    return Stage(config=SchedulerConfig(chunked_prefill_size=chunk, prefill_max_requests=most), rows=16, **fields)


@pytest.mark.parametrize(("most", "started"), [(None, 5), (1, 1), (3, 3), (9, 5)])
def test_no_more_prompts_start_in_a_step_than_may(most, started):
    stage = stage_of(most)
    for number in range(5):
        stage.ask(f"r{number}", prompt=4)
    plan = stage.step()

    assert seated(plan) == [f"r{number}" for number in range(started)]
    assert len(plan.chunks) == started


def test_those_that_wait_for_the_next_step_know_why_and_start_then():
    stage = stage_of(2)
    for number in range(3):
        stage.ask(f"r{number}", prompt=4, max_new_tokens=40)
    stage.step()
    assert stage.why("r2") == "others that came first fill the step"

    assert seated(stage.step()) == ["r2"], "prompts count, and decodes do not"


def test_a_prompt_that_has_begun_counts_and_always_goes_on():
    stage = stage_of(1, chunk=16)
    stage.ask("long", prompt=40)
    stage.step()
    stage.ask("short", prompt=2)
    chunks = [stage.step().chunks for _ in range(3)]

    assert [[chunk.length for chunk in step] for step in chunks] == [[16], [8], [2]]


def test_a_prompt_that_starts_counts_though_no_token_of_it_fits_behind_its_long_prefix():
    stage = stage_of(2, deep_prefix=16)
    prefix = tuple(range(3, 3 + 128))
    stage.ask("cached", prompt=(*prefix, 1), max_new_tokens=1)
    for _ in range(3):
        stage.step()
    stage.ask("a short one is open", prompt=1, max_new_tokens=400)
    stage.step()
    for number in range(3):
        stage.ask(f"r{number}", prompt=(*prefix, *[number] * 60))
    plan = stage.step()

    assert seated(plan) == ["r0", "r1"]
    assert len(plan.chunks) == 1, "behind 128 tokens one takes nine times as long"


def test_the_delayer_waits_for_no_more_prompts_than_may_start():
    policy = PolicyConfig(lora_policy="wait", enable_prefill_delayer=True, prefill_delayer_queue_min_ratio=0.5)
    stage = stage_of(2, policy=policy)
    for number in range(8):
        stage.ask(f"runs{number}", prompt=1, max_new_tokens=400)
    for _ in range(4):
        stage.step()
    stage.ask("first", at=1.0)
    assert seated(stage.step(at=1.0)) == [], "half of the running would be four, but two fill a step"
    stage.ask("second", at=1.1)

    assert seated(stage.step(at=1.1)) == ["first", "second"]


def test_a_step_without_room_for_a_prompt_is_refused():
    with pytest.raises(ConfigError, match="prefill_max_requests must be at least 1, not 0"):
        SchedulerConfig(prefill_max_requests=0)
