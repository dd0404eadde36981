"""Short prompts beside long ones: they start at once, and the long ones hardly notice."""

from __future__ import annotations

from collections import Counter

import pytest

from rota.core.config import SchedulerConfig
from rota.core.plan import StepPlan
from rota.core.tenant import Tenant
from rota.policy.prefill_budget import newcomers_part
from tests.scheduler.stage import Stage, seated

CHUNK = 64


def stage(chunk: int = CHUNK, **found) -> Stage:
    config = SchedulerConfig(chunked_prefill_size=chunk, enable_prefix_caching=False)
    return Stage(**{"blocks": 4096, "rows": 64, "max_sequence_tokens": 4096, **found}, config=config)


def lengths(plan: StepPlan) -> list[int]:
    return [chunk.length for chunk in plan.chunks]


def test_a_short_prompt_starts_beside_a_long_one_that_has_begun():
    there = stage()
    there.ask("long", prompt=1000)
    assert lengths(there.step()) == [CHUNK]
    there.ask("short", prompt=10)
    plan = there.step()

    assert seated(plan) == ["short"]
    assert sorted(lengths(plan)) == [10, CHUNK - 10], "what the short one leaves goes to the long one"


def test_a_short_prompt_starts_beside_a_long_one_that_came_first_in_the_same_moment():
    there = stage()
    there.ask("long", prompt=1000, at=0.0)
    there.ask("short", prompt=10, at=0.5)
    plan = there.step(at=1.0)

    assert seated(plan) == ["long", "short"]
    assert lengths(plan) == [CHUNK - 10, 10]


def test_a_short_prompt_starts_beside_a_long_one_though_another_long_one_is_before_it_in_its_adapters_queue():
    there = stage(adapters=1)
    there.seat(1, max_new_tokens=1)
    there.ask("long", prompt=1000, at=0.0)
    there.ask("also long", adapter=1, prompt=1000, at=0.1)
    there.ask("short", adapter=1, prompt=10, at=0.2)

    assert seated(there.step(at=1.0)) == ["long", "short"]


@pytest.mark.parametrize("waiting", [1, 300])
def test_a_short_prompt_is_found_behind_any_number_of_long_ones(waiting):
    there = stage()
    there.scheduler.check = lambda: None  # it walks through all that wait, after every request
    for number in range(waiting + 1):
        there.ask(f"long{number}", prompt=1000, at=float(number))
    there.step(at=3000.0)
    there.ask("short", prompt=10)

    assert seated(there.step()) == ["short"]


def test_long_prompts_that_wait_for_their_turn_hold_no_kv():
    there = stage()
    for number in range(5):
        there.ask(f"long{number}", prompt=1000, at=float(number))
    for _ in range(10):
        there.step(at=9.0)

    assert there.scheduler._state.running_count == 1
    assert there.why("long1") == "others that came first fill the step"


def test_a_long_prompt_alone_fills_every_step():
    there = stage()
    there.ask("long", prompt=10 * CHUNK)
    assert [lengths(there.step()) for _ in range(10)] == [[CHUNK]] * 10


def test_prompts_that_fit_are_planned_by_arrival_as_they_come():
    there = stage()
    for number, length in enumerate((40, 30, 20, 30)):
        there.ask(f"r{number}", prompt=length, at=float(number))
    first, second = there.step(at=9.0), there.step()

    assert (seated(first), lengths(first)) == (["r0", "r1"], [40, 24])
    assert (seated(second), lengths(second)) == (["r2", "r3"], [6, 20, 30])


def test_a_stream_of_short_prompts_lets_a_long_one_end_in_time():
    """It may yield a quarter of its length, and from then on a quarter of each step."""
    there = stage()
    there.ask("long", prompt=1000)
    there.step()
    steps, begun = 1, {0}
    while begun:
        for number in range(8):
            there.ask(f"short{steps}-{number}", prompt=16, max_new_tokens=1)
        plan = there.step()
        steps += 1
        begun = {chunk.row for chunk in plan.chunks if chunk.row == 0 and not chunk.samples}
        begun = begun or ({0} if all(chunk.row for chunk in plan.chunks) else set())

    assert steps <= 1000 * (1 + 1 / 4 + 1 / 3) / CHUNK + 2


def test_within_a_tenants_share_its_short_prompts_pass_its_long_one():
    there = stage()
    a, b = Tenant(name="a"), Tenant(name="b")
    there.ask("long-a", prompt=1000, tenant=a)
    there.ask("long-b", prompt=1000, tenant=b, at=0.1)
    there.step(at=0.2)
    there.step()
    there.ask("short-a", prompt=8, tenant=a)
    plan = there.step()

    assert seated(plan) == ["short-a"]
    by_row = Counter({chunk.row: chunk.length for chunk in plan.chunks})
    assert by_row[1] == CHUNK // 2, "b has its share, whatever a does with its own"
    assert sum(by_row.values()) <= CHUNK


def test_in_a_queue_a_tenants_long_prompts_that_wait_for_a_turn_do_not_keep_other_tenants_waiting():
    there = stage()
    comes_first = Tenant(name="a", priority=1)
    there.ask("long-a", prompt=1000, tenant=comes_first)
    there.step()
    there.ask("also-long-a", prompt=1000, tenant=comes_first)
    there.ask("short-b", prompt=8, tenant="b")

    assert seated(there.step()) == ["short-b"]


@pytest.mark.parametrize(("chunk", "planned"), [(3, [1, 1, 1]), (9, [3, 3, 3])])
def test_however_small_a_step_is_each_tenants_prompt_goes_on(chunk, planned):
    there = Stage(adapters=0, rows=3, config=SchedulerConfig(chunked_prefill_size=chunk))
    for number in range(3):
        there.ask(f"r{number}", prompt=100, tenant=f"tenant{number}")
    for _ in range(6):
        there.step()

    assert sorted(lengths(there.step()), reverse=True) == planned


@pytest.mark.parametrize(
    ("chunk", "decodes", "prompt"),
    [(64, 0, 64), (64, 1, 48), (64, 16, 48), (64, 17, 32), (64, 48, 16), (64, 49, 15), (64, 63, 1), (65, 49, 1)],
)
def test_decodes_count_in_the_steps_in_which_they_are_computed_as_long_as_something_is_left(chunk, decodes, prompt):
    there = stage(chunk, row_step=16)
    for number in range(decodes):
        there.ask(f"short{number}", prompt=1, max_new_tokens=400)
    there.step()
    there.ask("long", prompt=1000)
    plan = there.step()

    assert (len(plan.decodes), lengths(plan)) == (decodes, [prompt])


def deep(short_prompts: int) -> Stage:
    """A prompt of which 512 tokens are computed, on a device where a token costs twice behind 64 others."""
    there = stage(deep_prefix=64)
    for number in range(short_prompts):
        there.ask(f"short{number}", prompt=1, max_new_tokens=400)
    there.step()
    there.ask("long", prompt=1000)
    while sum(lengths(there.step())) and there.scheduler._state.groups[0].prefilling[0].planned < 512:
        pass
    return there


def test_a_chunk_behind_a_long_prefix_is_shorter_while_a_short_request_is_open():
    (length,) = lengths(deep(short_prompts=1).step())
    assert length == newcomers_part(CHUNK - 1), "4/3 of a step's work would be 9 tokens, and a quarter is the least"

    assert lengths(deep(short_prompts=0).step()) == [CHUNK]


def test_a_prompt_goes_on_by_a_token_at_least_however_little_of_the_step_decodes_leave():
    config = SchedulerConfig(chunked_prefill_size=3, enable_prefix_caching=False)
    there = Stage(rows=3, deep_prefix=4, config=config)
    there.ask("short", prompt=1, max_new_tokens=400)
    there.ask("long", prompt=90)
    plans = [there.step() for _ in range(90)]

    assert sum(chunk.length for plan in plans for chunk in plan.chunks) == 91


def test_an_urgent_prompt_goes_before_a_long_one_of_lower_priority():
    there = stage()
    there.ask("long", prompt=1000)
    there.step()
    there.ask("urgent", prompt=900, priority=1)
    plans = [there.step() for _ in range(4)]

    assert seated(plans[0]) == ["urgent"]
    urgent = sum(chunk.length for plan in plans for chunk in plan.chunks if chunk.row == 1)
    assert urgent >= 4 * CHUNK * 3 // 4
