"""Adapters that come, fail and go under random traffic: at the end nothing is held and nobody waits for an answer."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from rota.core.capacity import Capacity
from rota.core.config import LoraConfig, SchedulerConfig
from rota.core.errors import FaultCode
from rota.core.events import (
    AdapterAdded,
    AdapterRefused,
    AdapterRemoved,
    Admitted,
    Event,
    Finished,
    FinishReason,
    Preempted,
    SlotChanged,
    SlotState,
)
from rota.core.ids import AdapterId, RequestId
from rota.core.messages import (
    AddAdapter,
    Message,
    RemoveAdapter,
    Submit,
)
from rota.runtime.loop import run
from rota.scheduler import Scheduler
from tests.builders import abort, add_adapter, capacity, request
from tests.fakes import FakeDevice
from tests.scheduler.test_storm import expected, policies
from tests.scheduler.unreliable import UnreliableWorld
from tests.worlds import STEP_S, endings, outputs

ADAPTERS = range(1, 7)
EVENING = 10_000.0  # when everybody has gone home and every adapter is unloaded


def moments(most: int) -> st.SearchStrategy[float]:
    """Also in the middle of a step, while an adapter is being copied."""
    return st.integers(0, 2 * most).map(lambda halves: halves / 2)


@st.composite
def lives(draw: st.DrawFn, number: int) -> list[tuple[float, Message]]:
    """One adapter: added, perhaps removed (perhaps twice, perhaps by force), and used before, while and after."""
    added_at = draw(moments(20))
    messages: list[tuple[float, Message]] = [(added_at, add_adapter(number, added_at, is_pinned=draw(st.booleans())))]
    for _ in range(draw(st.integers(0, 2))):
        removed_at = added_at + draw(moments(30))
        messages.append(
            (removed_at, RemoveAdapter(adapter_id=AdapterId(number), at=removed_at, is_forced=draw(st.booleans())))
        )
    for turn in range(draw(st.integers(0, 4))):
        at = max(0.0, added_at + draw(moments(30)) - 1.0)
        asked = request(
            f"r{number}-{turn}",
            prompt=draw(st.integers(1, 30)),
            max_new_tokens=draw(st.integers(1, 20)),
            arrived_at=at,
            adapter=AdapterId(number),
        )
        messages.append((at, Submit(replace(asked, priority=draw(st.sampled_from([-1, 0, 0, 2]))))))
        if draw(st.booleans()):
            left_at = at + draw(moments(12))
            messages.append((left_at, abort(asked.request_id, at=left_at)))
    return messages


@st.composite
def storms(draw: st.DrawFn) -> list[tuple[float, Message]]:
    messages = [message for number in ADAPTERS for message in draw(lives(number))]
    for number in range(draw(st.integers(0, 3))):
        at = draw(moments(30))
        messages.append((at, Submit(request(f"base{number}", prompt=5, max_new_tokens=15, arrived_at=at))))
    return messages + [(EVENING, RemoveAdapter(adapter_id=AdapterId(number), at=EVENING)) for number in ADAPTERS]


failures = st.builds(
    set.union,
    st.sets(st.tuples(st.sampled_from(["fetch", "load"]), st.sampled_from(ADAPTERS), st.integers(1, 3)), max_size=6),
    # Often the first copy, which most adapters come to.
    st.sets(st.sampled_from(ADAPTERS), max_size=3).map(lambda numbers: {("load", number, 1) for number in numbers}),
)


@settings(max_examples=150, deadline=None)
@given(
    storms(),
    failures,
    st.integers(6, 30),
    st.integers(2, 6),
    st.integers(1, 3),
    st.integers(1, 7),
    st.booleans(),
    st.sampled_from([1, 2]),
    st.sampled_from([0.1 * STEP_S, 0.9 * STEP_S, 2.6 * STEP_S]),
    policies(),
)
def test_a_storm_of_adapters_leaves_nothing_behind(
    messages, failures, blocks, rows, slots, host_adapters, is_overlapped, depth, load_s, policy
):
    if not is_overlapped:
        failures = {failure for failure in failures if failure[0] == "fetch"}
    lora = LoraConfig(max_loaded_loras=host_adapters, enable_lora_overlap_loading=is_overlapped)
    found = capacity(blocks=blocks, block_size=8, rows=rows, max_sequence_tokens=64, slots=slots)
    config = SchedulerConfig(chunked_prefill_size=16, overlap_depth=depth)
    scheduler = Scheduler(config, found, policy, lora)
    scheduler._books.step_s, scheduler._books.copy_s = STEP_S, load_s  # measured before the storm
    world = UnreliableWorld(messages, FakeDevice(found), failures, host_adapters, depth, load_s)
    events: list[Event] = []

    def emit(batch: list[Event]) -> None:
        scheduler.check()
        events.extend(batch)
        assert scheduler.refusals().keys() == world.asked - at_work(events), "somebody waits and does not say why"

    run(scheduler, world, emit, depth)
    scheduler.check()

    assert scheduler.is_idle
    assert_requests_ended(messages, events, found)
    assert_adapters_were_answered(messages, events)
    assert not world.held, "an adapter was left in host memory"
    last_state = {event.slot: event.state for event in events if isinstance(event, SlotChanged)}
    assert set(last_state.values()) <= {SlotState.EMPTY}


def at_work(events: list[Event]) -> set[RequestId]:
    """Those who have ended or run."""
    working: set[RequestId] = set()
    for event in events:
        if isinstance(event, Admitted | Finished):
            working.add(event.request_id)
        elif isinstance(event, Preempted):
            working.discard(event.request_id)
    return working


def assert_requests_ended(messages: list[tuple[float, Message]], events: list[Event], found: Capacity) -> None:
    """Each once, and each that ended by itself with the tokens it would have got alone."""
    ended, given_tokens = endings(events), outputs(events)
    for _, message in messages:
        if not isinstance(message, Submit):
            continue
        asked = message.request
        end, answer = ended.pop(asked.request_id), given_tokens.get(asked.request_id, [])
        right = expected(asked, found)
        assert answer == (right if end.reason is FinishReason.LENGTH else right[: len(answer)])
        assert (end.fault is not None) == (end.reason is FinishReason.FAILED)
        assert end.fault is None or end.fault.code is not FaultCode.NOT_A_NUMBER, "the failed copy was not heard of"
    assert not ended


def assert_adapters_were_answered(messages: list[tuple[float, Message]], events: list[Event]) -> None:
    for number in ADAPTERS:
        added = [event for event in events if isinstance(event, AdapterAdded) and event.adapter_id == number]
        removed = [event for event in events if isinstance(event, AdapterRemoved) and event.adapter_id == number]
        refused = [event for event in events if isinstance(event, AdapterRefused) and event.adapter_id == number]
        unknown = [event for event in refused if event.reason.startswith("No adapter")]
        adds = [message for _, message in messages if _is_about(message, AddAdapter, number)]
        removes = [message for _, message in messages if _is_about(message, RemoveAdapter, number)]

        assert len(added) + len(refused) - len(unknown) == len(adds), "an add was not answered, or twice"
        assert len(removed) <= 1
        assert len(added) <= len(removed), "added and never gone, though everything was unloaded in the evening"
        assert removed or len(unknown) == len(removes), "a removal was not answered"


def _is_about(message: Message, kind: type, number: int) -> bool:
    if isinstance(message, AddAdapter):
        return kind is AddAdapter and message.adapter.adapter_id == number
    return isinstance(message, kind) and isinstance(message, RemoveAdapter) and message.adapter_id == number


def test_an_adapter_that_is_unloaded_before_its_first_read_is_read_once_for_its_requests():
    """Host memory has room for one adapter; when there is room, a request and the client that added it both want it."""
    first = request("first", prompt=1, max_new_tokens=3, adapter=AdapterId(4), priority=-1)
    last = request("last", prompt=1, max_new_tokens=1, adapter=AdapterId(1), arrived_at=2.5)
    messages: list[tuple[float, Message]] = [(0.0, add_adapter(4)), (0.0, Submit(first)), (0.0, add_adapter(6))]
    messages += [(0.0, RemoveAdapter(adapter_id=AdapterId(6), at=0.0)), (2.5, add_adapter(1, 2.5)), (2.5, Submit(last))]
    messages += [
        (3.0, RemoveAdapter(adapter_id=AdapterId(1), at=3.0)),
        (EVENING, RemoveAdapter(adapter_id=AdapterId(4), at=EVENING)),
    ]
    found = capacity(blocks=6, block_size=8, rows=2, max_sequence_tokens=64, slots=1)
    world = UnreliableWorld(messages, FakeDevice(found), set(), 1, 1, 0.1)
    events: list[Event] = []
    scheduler = Scheduler(SchedulerConfig(overlap_depth=1), found, lora=LoraConfig(max_loaded_loras=1))

    run(scheduler, world, events.extend, 1)

    assert_requests_ended(messages, events, found)
    assert_adapters_were_answered(messages, events)
    assert not world.held
