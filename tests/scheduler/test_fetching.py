"""Adapters are read from disk by one order a pass, and not because a question was asked."""

from __future__ import annotations

import random

import pytest

from rota.core.config import LoraConfig, SchedulerConfig
from rota.core.events import Event, HostChanged, HostState
from rota.core.ids import AdapterId
from rota.core.messages import AdapterFetched, AdapterReady, Message
from rota.core.plan import StepPlan
from rota.core.policy_config import PolicyConfig
from rota.policy.slot_policies import SLOT_POLICIES, make_slot_policy
from rota.runtime.loop import run
from rota.scheduler import Scheduler
from rota.scheduler.admission import LOOK_AHEAD
from rota.sim import VirtualWorld
from tests.builders import add_adapter, capacity, submit
from tests.costs import constant_cost
from tests.fakes import FakeDevice
from tests.scheduler.stage import Stage
from tests.worlds import endings, serve


def on_disk(host_adapters: int, *adapters: int, policy: str = "wait", max_stall_ms: float | None = None) -> Stage:
    """One slot, and room in host memory for the last of the adapters that were added."""
    lora = LoraConfig(max_loras_per_batch=1, max_loaded_loras=host_adapters)
    config = PolicyConfig(lora_policy=policy, lora_max_stall_ms=max_stall_ms)
    stage = Stage(adapters=0, slots=1, policy=config, lora=lora)
    for number in adapters:
        stage.tell(add_adapter(number))
        stage.step()
        stage.tell(AdapterFetched(adapter_id=AdapterId(number), at=0.0))
    return stage


def fetched(plan: StepPlan) -> list[int]:
    return [adapter.adapter_id for adapter in plan.fetches]


@pytest.mark.parametrize("policy", ["wait", "drain", "rotate"])
def test_the_adapter_that_is_next_in_line_is_read_while_it_waits_for_a_slot(policy):
    stage = on_disk(3, 2, 3, 4, 1, policy=policy)
    stage.seat(1)
    stage.ask("next", adapter=2)

    assert fetched(stage.step()) == [2]
    assert fetched(stage.step()) == [], "it is on its way"


@pytest.mark.parametrize(
    ("policy", "max_stall_ms", "leaves"), [("wait", None, True), ("rotate", None, True), ("rotate", 1000.0, False)]
)
def test_an_adapter_that_runs_in_its_slot_leaves_host_memory_for_the_next_unless_a_pause_is_promised(
    policy, max_stall_ms, leaves
):
    stage = on_disk(1, 2, 1, policy=policy, max_stall_ms=max_stall_ms)
    stage.seat(1)
    stage.ask("next", adapter=2)
    plan = stage.step()

    assert (fetched(plan), [*plan.drops]) == (([2], [1]) if leaves else ([], []))


def test_adapters_that_have_room_in_host_memory_are_read_in_one_order_if_they_would_come_next():
    stage = on_disk(4, 2, 3, 4, 5, 6, 7, 1)
    stage.seat(1)
    for number in (2, 3, 4):
        stage.ask(f"cold{number}", adapter=number)

    assert fetched(stage.step()) == [2, 3, 4]


def test_an_adapter_that_lacks_kv_does_not_keep_those_behind_it_from_being_read():
    lora = LoraConfig(max_loras_per_batch=1, max_loaded_loras=3)
    stage = Stage(adapters=0, slots=1, lora=lora, blocks=12)
    for number in (2, 3, 4, 1):
        stage.tell(add_adapter(number))
        stage.step()
        stage.tell(AdapterFetched(adapter_id=AdapterId(number), at=0.0))
    stage.seat(1, prompt=40, max_new_tokens=40)
    stage.ask("large, at hand", adapter=4, at=-1.0, prompt=180)
    stage.ask("small, on disk", adapter=2, prompt=4)

    assert fetched(stage.step()) == [2]


@pytest.mark.parametrize(("lacking", "is_read"), [(LOOK_AHEAD - 1, True), (LOOK_AHEAD, False)])
def test_behind_a_few_adapters_that_lack_kv_only_those_that_hold_kv_are_read(lacking, is_read):
    *large, small, resident = range(1, lacking + 3)
    lora = LoraConfig(max_loras_per_batch=1, max_loaded_loras=lacking + 1)
    stage = Stage(adapters=0, slots=1, lora=lora, blocks=12)
    for number in (small, *large, resident):
        stage.tell(add_adapter(number))
        stage.step()
        stage.tell(AdapterFetched(adapter_id=AdapterId(number), at=0.0))
    stage.seat(resident, prompt=40, max_new_tokens=40)
    for number in large:
        stage.ask(f"large{number}, at hand", adapter=number, at=-1.0, prompt=180)
    stage.ask("small, on disk", adapter=small, prompt=4)

    assert fetched(stage.step()) == ([small] if is_read else [])


def test_with_a_promise_adapters_without_requests_leave_their_copies_one_at_a_time():
    policy = PolicyConfig(lora_policy="rotate", lora_max_stall_ms=1000.0)
    stage = Stage(adapters=0, slots=2, policy=policy, lora=LoraConfig(max_loaded_loras=2))
    for number in (3, 4, 1, 2):
        stage.tell(add_adapter(number))
        stage.step()
        stage.tell(AdapterFetched(adapter_id=AdapterId(number), at=0.0))
    stage.seat(1, 2, max_new_tokens=1)
    for number in (3, 4):
        stage.ask(f"cold{number}", adapter=number)
    plan = stage.step()

    assert (len(plan.drops), len(fetched(plan))) == (1, 1)


def test_only_an_adapter_that_lies_in_host_memory_takes_room_there():
    stage = on_disk(1, 2, 1)
    stage.step()
    stage.said(HostChanged)
    stage.ask("cold", adapter=2)
    stage.step()
    stage.tell(AdapterFetched(adapter_id=AdapterId(2), at=0.0, size_bytes=5))
    stage.step()

    assert [(one.adapter_id, one.state, one.size_bytes) for one in stage.said(HostChanged)] == [
        (1, HostState.GONE, 0),
        (2, HostState.READING, 0),
        (2, HostState.HELD, 5),
    ]


def test_pinned_adapters_that_share_one_place_in_host_memory_come_to_their_slots_one_after_the_other():
    stage = Stage(adapters=0, slots=3, lora=LoraConfig(max_loaded_loras=1))
    stage.tell(add_adapter(1, is_pinned=True))
    stage.tell(add_adapter(2, is_pinned=True))
    read, seated = list[int](), list[int]()
    for _ in range(8):
        plan = stage.step()
        read += fetched(plan)
        for number in fetched(plan):
            stage.tell(AdapterFetched(adapter_id=AdapterId(number), at=0.0))
        for load in plan.loads:
            seated.append(load.adapter_id)
            stage.tell(AdapterReady(load.adapter_id, 0.0))

    assert sorted(seated) == [1, 2]
    assert len(read) <= 4, "none is read again and again"


def traffic(seed: int) -> list[tuple[float, Message]]:
    dice = random.Random(seed)
    messages: list[tuple[float, Message]] = [(0.0, add_adapter(number)) for number in range(1, 13)]
    for number in range(120):
        at, adapter = dice.randrange(20) / 4, AdapterId(1 + dice.randrange(12))
        length, output = dice.choice([4, 40]), dice.choice([3, 70])
        ask = submit(f"r{number}", adapter=adapter, prompt=length, max_new_tokens=output, arrived_at=at)
        messages.append((at, ask))
    return messages


def events(policy: str, seed: int) -> list[Event]:
    config = PolicyConfig(lora_policy=policy, lora_drain_wait_threshold=0.5)
    found = capacity(blocks=36, rows=16, slots=3)
    scheduler = Scheduler(SchedulerConfig(), found, config, LoraConfig(max_loaded_loras=5))
    happened: list[Event] = []
    run(scheduler, VirtualWorld(traffic(seed), constant_cost(seconds=0.02, load_s=0.01, fetch_s=0.05)), happened.extend)
    return happened


@pytest.mark.parametrize("name", ["wait", "drain", "rotate"])
def test_how_far_a_policy_looks_does_not_decide_what_is_read(name, monkeypatch):
    def curious(_config, found):
        """The same policy, but it looks at every claimant in every pass, twice."""
        policy = make_slot_policy(PolicyConfig(lora_policy=name, lora_drain_wait_threshold=0.5), found)
        observe = policy.observe

        def observe_closely(slots, now):
            assert list(slots.claimants()) == list(slots.claimants())
            observe(slots, now)

        policy.observe = observe_closely
        return policy

    monkeypatch.setitem(SLOT_POLICIES, "curious", curious)
    for seed in range(3):
        assert events("curious", seed) == events(name, seed)


def test_with_a_promise_an_adapter_in_a_slot_leaves_host_memory_when_it_has_no_requests():
    """Host memory holds as many adapters as there are slots, so no other adapter could ever be read."""
    policy = PolicyConfig(lora_policy="rotate", lora_max_stall_ms=1000.0)
    lora = LoraConfig(max_loaded_loras=1, enable_lora_overlap_loading=False)
    messages: list[tuple[float, Message]] = [(0.0, add_adapter(number)) for number in (1, 2)]
    messages += [(0.0, submit(f"r{number}", adapter=AdapterId(number), max_new_tokens=1)) for number in (1, 2)]

    events = serve(messages, FakeDevice(capacity(slots=1, rows=1)), policy=policy, lora=lora)

    assert len(endings(events)) == 2
