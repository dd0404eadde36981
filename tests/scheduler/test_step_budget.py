"""What a step may take is a time: prompts get as many tokens as fit, and all of them get on."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from rota.core.config import SchedulerConfig
from rota.core.errors import ConfigError
from rota.core.plan import StepPlan, StepResult
from rota.core.tenant import Tenant
from rota.policy.prefill_budget import newcomers_part, work_of
from rota.policy.step_times import LEAST_TOKENS
from tests.scheduler.balance import check_balance
from tests.scheduler.stage import Stage, seated

CHUNK = 512
DECODE_S, TOKEN_S = 0.02, 0.003


class TimedStage(Stage):
    """A device on which decodes take `DECODE_S`, and each token of a prompt `TOKEN_S` more."""

    token_s = TOKEN_S

    def finish(self, plan: StepPlan, token: int = 7) -> None:
        tokens = (token,) * len(plan.sampled_rows)
        deep = self.scheduler._state.deep_prefix or math.inf
        step_s = DECODE_S + self.token_s * sum(work_of(chunk.length, chunk.start, deep) for chunk in plan.chunks)
        self.events += self.scheduler.commit(plan, StepResult(at=self.now, step_s=step_s, tokens=tokens))
        check_balance(self.scheduler)


def stage(max_step_ms: float | str = "auto", **found: Any) -> TimedStage:
    config = SchedulerConfig(chunked_prefill_size=CHUNK, enable_prefix_caching=False, max_step_ms=max_step_ms)
    tried = {"device": "cpu", "decode_s": DECODE_S, "token_s": TOKEN_S, "max_sequence_tokens": 4096, "blocks": 4096}
    return TimedStage(**{"rows": 64, **tried, **found}, config=config)


def streaming(there: TimedStage, streams: int = 1) -> TimedStage:
    for number in range(streams):
        there.ask(f"stream{number}", prompt=1, max_new_tokens=4000)
    there.step()
    assert len(there.step().decodes) == streams
    return there


def test_prompts_beside_a_stream_get_as_many_tokens_as_a_few_tokens_take():
    there = streaming(stage())
    for number in range(8):
        there.ask(f"crowd{number}", prompt=300)
    plans = [there.step() for _ in range(40)]

    assert all(len(plan.decodes) >= 1 for plan in plans)
    assert {plan.prompt_tokens for plan in plans} == {20}, "four times 20 ms, of which decodes take one"


def test_without_a_stream_a_step_may_take_four_times_as_long():
    there = stage()
    there.ask("alone", prompt=500)

    assert there.step().prompt_tokens == 96


def test_a_number_of_milliseconds_is_obeyed():
    there = streaming(stage(max_step_ms=320))
    there.ask("long", prompt=500)

    assert there.step().prompt_tokens == 96


def test_the_number_of_tokens_is_the_upper_bound():
    there = streaming(stage(max_step_ms=60_000))
    there.ask("long", prompt=4000)

    assert there.step().prompt_tokens == CHUNK - 1


@pytest.mark.parametrize("fields", [{"device": None}, {"token_s": 0.0}], ids=["no device", "nothing was tried"])
def test_where_no_speed_is_known_the_number_of_tokens_decides(fields):
    there = streaming(stage(**fields))
    there.ask("long", prompt=4000)

    assert there.step().prompt_tokens == CHUNK - 1


def test_a_speed_that_nobody_has_tried_is_measured_in_the_first_long_step():
    there = streaming(stage(device="cuda", token_s=0.0))
    there.ask("long", prompt=4000)
    found = [there.step().prompt_tokens for _ in range(4)]

    assert found == [CHUNK - 1, 20, 20, 20]


def test_prompts_get_on_where_decodes_alone_take_longer_than_a_step_may():
    there = streaming(stage(max_step_ms=10), streams=2)
    there.ask("long", prompt=100)
    plans = [there.step() for _ in range(20)]

    assert sum(plan.prompt_tokens for plan in plans) == 100
    assert max(plan.prompt_tokens for plan in plans) == LEAST_TOKENS


def test_two_tenants_prompts_both_get_on_within_a_short_step():
    there = streaming(stage())
    for name in ("a", "b"):
        there.ask(f"long-{name}", prompt=60, tenant=Tenant(name=name), max_new_tokens=1)
    plans = [there.step() for _ in range(9)]

    assert {request_id for plan in plans for request_id in seated(plan)} == {"long-a", "long-b"}
    assert sum(plan.prompt_tokens for plan in plans) == 120


def test_a_device_that_becomes_slower_gets_fewer_tokens_and_one_slow_step_shortens_the_next_alone():
    there = streaming(stage())
    there.ask("long", prompt=4000)
    there.step()
    there.token_s = 10 * TOKEN_S
    there.step()
    there.token_s = TOKEN_S
    assert [there.step().prompt_tokens for _ in range(3)] == [LEAST_TOKENS, 20, 20]

    there.token_s = 2 * TOKEN_S
    for _ in range(2):
        there.step()
    assert there.step().prompt_tokens == 10


def test_a_chunk_behind_a_long_prefix_counts_for_what_it_takes():
    there = streaming(stage(deep_prefix=64))
    there.ask("long", prompt=1000)
    found = []
    while sum(found) < 1000:
        found.append(there.step().prompt_tokens)

    assert found[0] == 19
    assert found[-2] == newcomers_part(20), "behind 900 tokens each counts for fifteen; a quarter is the least"


def test_no_newcomer_is_seated_without_a_token_when_the_time_is_used_up():
    there = streaming(stage(deep_prefix=64))
    there.ask("long", prompt=1000)
    while there.scheduler._state.groups[0].prefilling[:1] == [] or there.step().chunks[0].start < 500:
        there.step()
    for number in range(5):
        there.ask(f"short{number}", prompt=4)
    for _ in range(5):
        plan = there.step()
        rows = {chunk.row for chunk in plan.chunks}
        assert all(seat.row in rows for seat in plan.seats)


def test_a_step_goes_without_prompts_once_more_decode_than_were_seen():
    there = stage()
    for number in range(5):
        there.ask(f"stream{number}", prompt=1, max_new_tokens=4000)
    there.step()
    there.ask("long", prompt=100)
    plans = [there.step() for _ in range(3)]

    assert [bool(plan.chunks) for plan in plans] == [False, True, True]


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("inf"), float("nan")])
def test_a_limit_that_is_no_time_is_refused(wrong):
    with pytest.raises(ConfigError, match="max_step_ms must be a finite number above 0"):
        replace(SchedulerConfig(), max_step_ms=wrong)
