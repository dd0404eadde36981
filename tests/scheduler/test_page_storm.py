"""Adapters of different sizes that come and go under random traffic: slots close and open, and every request ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from rota.core.config import LoraConfig, SchedulerConfig
from rota.core.events import AdapterRefused, AdapterRemoved, Event, FinishReason, SlotChanged, SlotState
from rota.core.ids import AdapterId
from rota.core.messages import AdapterFetched, Message, RemoveAdapter, Submit
from rota.core.policy_config import PolicyConfig
from rota.core.tenant import SOLE_TENANT, Tenant
from rota.runtime.loop import run
from rota.scheduler import Scheduler
from tests.builders import add_adapter, capacity, request
from tests.fakes import FakeDevice, continuation
from tests.worlds import DeviceWorld, endings, outputs

ADAPTERS = range(1, 8)
TENANTS = [SOLE_TENANT, Tenant(name="heavy", weight=3.0), Tenant(name="light", weight=0.5)]
EVENING = 10_000.0  # when every adapter is unloaded

Sizes = dict[int, int]


class SizedWorld(DeviceWorld):
    """Knows how large the adapters are that were read and not refused or removed since."""

    def __init__(
        self, messages: Iterable[tuple[float, Message]], device: FakeDevice, sizes: Sizes, depth: int, load_s: float
    ) -> None:
        """Sizes are pages, or matrices if the device has places for these."""
        super().__init__(messages, device, depth, load_s, pages_of=sizes.__getitem__)
        self.known: Sizes = {}
        self._has_matrices = bool(device.capacity.matrices)

    def receive(self, until: float) -> list[Message] | None:
        messages = super().receive(until)
        return None if messages is None else [self._noted(message) for message in messages]

    def _noted(self, message: Message) -> Message:
        if not isinstance(message, AdapterFetched):
            return message
        self.known[message.adapter_id] = message.pages
        return replace(message, pages=0, matrices=message.pages) if self._has_matrices else message

    def hear(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, AdapterRefused | AdapterRemoved):
                self.known.pop(event.adapter_id, None)


@st.composite
def lives(draw: st.DrawFn, number: int) -> list[tuple[float, Message]]:
    """One adapter: added, perhaps removed, and asked in between by one tenant or several."""
    added_at, tenants = float(draw(st.integers(0, 20))), draw(st.sampled_from([TENANTS[:1], TENANTS]))
    added = add_adapter(number, added_at, is_pinned=draw(st.integers(0, 4)) == 0)
    messages: list[tuple[float, Message]] = [(added_at, replace(added, is_read_later=draw(st.booleans())))]
    if draw(st.booleans()):
        removed_at = added_at + draw(st.integers(0, 30))
        messages.append(
            (removed_at, RemoveAdapter(adapter_id=AdapterId(number), at=removed_at, is_forced=draw(st.booleans())))
        )
    for turn in range(draw(st.integers(0, 4))):
        at = added_at + draw(st.integers(0, 30))
        asked = request(
            f"r{number}-{turn}",
            prompt=draw(st.integers(1, 20)),
            max_new_tokens=draw(st.sampled_from([1, 5, 40])),
            arrived_at=at,
            adapter=AdapterId(number),
            tenant=draw(st.sampled_from(tenants)),
            priority=draw(st.sampled_from([0, 0, 0, 1])),
        )
        messages.append((at, Submit(asked)))
    return messages


@st.composite
def storms(draw: st.DrawFn) -> list[tuple[float, Message]]:
    messages = [message for number in ADAPTERS for message in draw(lives(number))]
    return messages + [(EVENING, RemoveAdapter(adapter_id=AdapterId(number), at=EVENING)) for number in ADAPTERS]


@settings(max_examples=60, deadline=None)
@given(
    storms(),
    st.fixed_dictionaries({number: st.sampled_from([1, 1, 2, 3, 6, 9]) for number in ADAPTERS}),
    st.integers(1, 14),
    st.integers(1, 5),
    st.integers(8, 40),
    st.integers(2, 8),
    st.integers(1, 7),
    st.booleans(),
    st.sampled_from([1, 2]),
    st.sampled_from([0.1, 1.7]),
    st.sampled_from(["rotate", "drain", "wait"]),
    st.sampled_from(["pages", "matrices"]),
)
def test_every_request_ends_and_no_page_is_lost(
    messages, sizes, pages, slots, blocks, rows, host_adapters, is_overlapped, depth, load_s, policy, kind
):
    found = capacity(blocks=blocks, block_size=8, rows=rows, max_sequence_tokens=64, slots=slots, **{kind: pages})
    config = SchedulerConfig(chunked_prefill_size=16, overlap_depth=depth)
    lora = LoraConfig(max_loaded_loras=host_adapters, enable_lora_overlap_loading=is_overlapped)
    chosen = PolicyConfig(lora_policy=policy, lora_drain_wait_threshold=1.5)
    scheduler = Scheduler(config, found, chosen, lora)
    world = SizedWorld(messages, FakeDevice(found), sizes, depth, load_s)
    events: list[Event] = []

    def emit(batch: list[Event]) -> None:
        scheduler.check()
        world.hear(batch)
        events.extend(batch)
        check_slots(scheduler, world.known, pages, slots)

    run(scheduler, world, emit, depth)
    scheduler.check()

    assert scheduler.is_idle
    assert scheduler._books.slots.total == slots, "a slot is closed though no adapter is known"
    last_state = {event.slot: event.state for event in events if isinstance(event, SlotChanged)}
    assert {*last_state.values()} <= {SlotState.EMPTY}
    assert_answers(messages, events)


def check_slots(scheduler: Scheduler, known: Sizes, pages: int, slots: int) -> None:
    """The open slots and the residents' pages, by a plain model."""
    ledger, largest = scheduler._books.slots, sorted(known.values(), reverse=True)
    assert ledger.total == max(k for k in range(slots + 1) if sum(largest[:k]) <= pages)
    assert sum(known[adapter_id] for adapter_id in ledger.residencies) <= pages
    assert ledger.total > sum(scheduler._books.groups[adapter_id].is_pinned for adapter_id in ledger.residencies)


def assert_answers(messages: list[tuple[float, Message]], events: list[Event]) -> None:
    """Each request ended once; one that ended by itself got the tokens that it would have got alone."""
    ended, given_tokens = endings(events), outputs(events)
    for _, message in messages:
        if not isinstance(message, Submit):
            continue
        asked = message.request
        end, answer = ended.pop(asked.request_id), given_tokens.get(asked.request_id, [])
        right = continuation(asked.prompt, asked.sampling.max_new_tokens)
        assert answer == (right if end.reason is FinishReason.LENGTH else right[: len(answer)])
        assert (end.reason is FinishReason.FAILED) == (end.fault is not None)
        if end.fault and ("pages" in end.fault.message or "places" in end.fault.message):
            assert not answer, "an adapter that is too large has answered"
    assert not ended
