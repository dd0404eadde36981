"""Of thousands of adapters few have requests: the scheduler keeps little of the others, and never walks them all."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from dataclasses import replace

import pytest

from rota.core.config import LoraConfig, SchedulerConfig
from rota.core.ids import AdapterId
from rota.core.messages import AdapterFetched, Inspect, Message
from rota.core.plan import StepResult
from rota.core.policy_config import PolicyConfig
from rota.scheduler import Scheduler
from rota.scheduler.adapter_state import Group
from tests.builders import add_adapter, capacity, submit
from tests.counting import calls_in

FEW, MANY = 100, 2000
MOST_BYTES = 700


class Unwalked(dict[AdapterId, Group]):
    """Finds what it is asked for, and cannot be walked through."""

    def __iter__(self) -> Iterator[AdapterId]:
        raise AssertionError("something walks through all adapters")

    keys = values = items = __iter__  # type: ignore[assignment]


def known(adapters: int, policy: str = "rotate") -> Scheduler:
    """A scheduler that knows so many adapters and has read none of them."""
    lora = LoraConfig(max_loras_per_batch=2, max_loaded_loras=4)
    scheduler = Scheduler(SchedulerConfig(), capacity(), PolicyConfig(lora_policy=policy), lora)
    for number in range(1, adapters + 1):
        scheduler.apply(replace(add_adapter(number), is_read_later=True))
    pass_once(scheduler)
    state = scheduler._state
    state.groups = Unwalked(state.groups)
    return scheduler


def pass_once(scheduler: Scheduler) -> int:
    """One step, whose reads end at once; the calls that it took."""
    calls, plan = calls_in(lambda: scheduler.plan(0.0))
    more, _ = calls_in(lambda: scheduler.commit(plan, StepResult(at=0.0, tokens=(7,) * len(plan.sampled_rows))))
    for adapter in plan.reads:
        scheduler.apply(AdapterFetched(adapter_id=adapter.adapter_id, at=0.0))
    return calls + more


def test_an_adapter_without_requests_takes_little_memory():
    tracemalloc.start()
    try:
        scheduler = known(10)
        before = tracemalloc.get_traced_memory()[0]
        bigger = known(10 + MANY)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()

    assert scheduler is not bigger
    assert taken < MANY * MOST_BYTES, f"{taken / MANY:.0f} bytes each"


@pytest.mark.parametrize("policy", ["rotate", "drain", "wait"])
def test_a_pass_calls_as_many_functions_however_many_adapters_are_known(policy):
    def calls(adapters: int) -> list[int]:
        scheduler = known(adapters, policy)
        for number in range(1, 9):
            scheduler.apply(submit(f"r{number}", adapter=AdapterId(number * 11), max_new_tokens=20))
        return [pass_once(scheduler) for _ in range(20)]

    assert calls(FEW) == calls(MANY)


@pytest.mark.parametrize(
    "message",
    [
        lambda last: replace(add_adapter(last + 1), is_read_later=True),
        lambda last: add_adapter(last + 1, is_pinned=True),
        lambda last: submit("asks", adapter=AdapterId(last)),
        lambda last: AdapterFetched(adapter_id=AdapterId(last), at=0.0, pages=0),
        lambda last: Inspect(0.0, only=(AdapterId(last),)),
    ],
    ids=["added", "pinned", "asked for", "read", "looked at"],
)
def test_the_last_adapter_costs_what_the_first_cost(message):
    def calls(adapters: int) -> int:
        scheduler = known(adapters)
        one: Message = message(adapters)
        return calls_in(lambda: scheduler.apply(one))[0]

    assert calls(FEW) == calls(MANY)
