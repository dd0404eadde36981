"""Versions that come, fail, move their requests and go under random traffic: no answer and no KV is of two of them.

But for answers that were moved: these name both versions and the token of the change.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from rota.core.config import LoraConfig, SchedulerConfig
from rota.core.events import AdapterAdded, AdapterRemoved, Event, FinishReason
from rota.core.ids import AdapterId
from rota.core.messages import Message, MoveRequests, RemoveAdapter, Submit
from rota.core.moved import Moved
from rota.core.request import Request
from rota.runtime.loop import run
from rota.scheduler import Scheduler
from tests.builders import abort, add_adapter, capacity, request
from tests.scheduler.test_storm import PREFIXES, expected, policies
from tests.scheduler.unreliable import UnreliableWorld
from tests.watchful import WatchfulDevice
from tests.worlds import STEP_S, endings, outputs

VERSIONS = range(1, 6)
EVENING = 10_000.0


@st.composite
def storms(draw: st.DrawFn) -> list[tuple[float, Message]]:
    """A name gets one version after the other; its requests are moved, or end under the version they began with."""
    at, messages = 0.0, list[tuple[float, Message]]()
    for number in VERSIONS:
        former = AdapterId(number - 1) if number > 1 and draw(st.booleans()) else None
        messages.append((at, replace(add_adapter(number, at), former=former)))
        messages += draw(requests(number, at))
        at += draw(st.integers(8, 24)) / 2
        if number == 1:
            continue
        old = AdapterId(number - 1)
        if draw(st.booleans()):
            moving = MoveRequests(old=old, new=AdapterId(number), at=at, keeps_kv=draw(st.booleans()))
            messages.append((at, moving))
        messages.append((at, RemoveAdapter(adapter_id=old, at=at, takes_requests=True)))
    return messages


@st.composite
def requests(draw: st.DrawFn, version: int, added_at: float) -> list[tuple[float, Message]]:
    """Requests for one version, most of them while it is there."""
    messages = list[tuple[float, Message]]()
    for number in range(draw(st.integers(0, 5))):
        at = added_at + draw(st.integers(0, 40)) / 2
        prompt = draw(st.sampled_from(PREFIXES)) + tuple(draw(st.lists(st.integers(0, 2), min_size=1, max_size=9)))
        asked = request(
            f"r{version}-{number}",
            prompt=prompt,
            max_new_tokens=draw(st.integers(1, 25)),
            arrived_at=at,
            adapter=AdapterId(version),
            tenant=draw(st.sampled_from(["a", "a", "b"])),
        )
        messages.append((at, Submit(asked)))
        if draw(st.integers(0, 3)) == 0:
            left_at = at + draw(st.integers(0, 25))
            messages.append((left_at, abort(asked.request_id, at=left_at)))
    return messages


failures = st.sets(
    st.tuples(st.sampled_from(["fetch", "load"]), st.sampled_from(VERSIONS), st.integers(1, 2)), max_size=3
)


@settings(max_examples=80, deadline=None)
@given(
    storms(),
    failures,
    st.integers(8, 30),
    st.integers(2, 6),
    st.integers(1, 3),
    st.integers(1, 6),
    st.sampled_from([1, 2]),
    policies(),
)
def test_a_storm_of_versions_mixes_nothing_and_leaves_nothing(
    storm, failures, blocks, rows, slots, host_adapters, depth, policy
):
    found = capacity(blocks=blocks, block_size=8, rows=rows, max_sequence_tokens=64, slots=slots)
    config = SchedulerConfig(chunked_prefill_size=16, overlap_depth=depth)
    scheduler = Scheduler(config, found, policy, LoraConfig(max_loaded_loras=host_adapters))
    evening = [(EVENING, RemoveAdapter(adapter_id=AdapterId(number), at=EVENING)) for number in VERSIONS]
    device = WatchfulDevice(found)
    world = UnreliableWorld([*storm, *evening], device, failures, host_adapters, depth, 0.9 * STEP_S)
    events: list[Event] = []

    def emit(batch: list[Event]) -> None:
        scheduler.check()
        events.extend(batch)

    run(scheduler, world, emit, depth)
    scheduler.check()

    assert scheduler.is_idle
    assert not world.held, "a version was left in host memory"
    added, removed = (
        {one.adapter_id for one in events if isinstance(one, kind)} for kind in (AdapterAdded, AdapterRemoved)
    )
    assert added <= removed, "a version was never gone"
    assert device.mixed <= {one.request_id for one in events if isinstance(one, Moved) and one.kept_kv}
    ended, answers = endings(events), outputs(events)
    for _, message in storm:
        if isinstance(message, Submit):
            asked = message.request
            end, answer, right = ended.pop(asked.request_id), answers.get(asked.request_id, []), expected(asked, found)
            assert answer == (right if end.reason is FinishReason.LENGTH else right[: len(answer)])
            assert device.makers[asked.request_id][: len(answer)] == named(asked, events, len(answer))
    assert not ended


def named(asked: Request, events: list[Event], length: int) -> list[AdapterId]:
    """The version of each token, as the events say."""
    versions, current = list[AdapterId](), asked.adapter_id
    for event in events:
        if isinstance(event, Moved) and event.request_id == asked.request_id:
            assert event.old == current, "a move begins where none has led"
            versions += [current] * (event.output_tokens - len(versions))
            current = event.new
    return (versions + [current] * (length - len(versions)))[:length]
