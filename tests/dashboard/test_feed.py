from __future__ import annotations

from dataclasses import replace

import pytest

from rota.core.events import (
    AdapterRemoved,
    AdapterStanding,
    Admitted,
    DrainChanged,
    DrainState,
    EngineRestarted,
    Explained,
    Finished,
    FinishReason,
    HostChanged,
    HostState,
    Inspected,
    Moved,
    PauseChanged,
    Preempted,
    Produced,
    Routed,
    SlotChanged,
    SlotReason,
    SlotState,
    Whereabouts,
)
from rota.core.ids import BASE, AdapterId, EngineId, RequestId, Slot
from rota.core.lora_paths import LoraPath
from rota.core.policy_config import READER_PACE
from rota.core.standstill import StoodStill
from rota.dashboard import open_requests
from rota.dashboard.feed import MOST_ROWS, MOST_TARGETS, AlreadySent, Feed
from rota.dashboard.frame import Spread
from rota.dashboard.lanes import MOST_TENURES
from rota.dashboard.open_requests import MOST_SHOWN
from rota.dashboard.tenants import MOST_KINDS, MOST_RESTARTS, MOST_TENANTS
from rota.observe.slot_pressure import SlotShortage
from rota.runtime.registry import Registry
from rota.runtime.replicas.roster import joint_state
from rota.runtime.service import ServicePhase, ServiceState
from rota.server.access.limits import LimitUse
from rota.server.traffic.route import Route, TrafficSplit
from tests.builders import capacity

READY = ServiceState(phase=ServicePhase.READY, capacity=capacity(rows=8, slots=2))


class Board:
    """Stands in for the service: what it says can be changed."""

    def __init__(self) -> None:
        self.state = READY


def registry(adapters: int) -> Registry:
    """Adapters with the ids from 1 on."""
    made = Registry("letters", "")
    for number in range(1, adapters + 1):
        made.add(LoraPath(name=f"adapter{number}", path=f"adapters/{number}"))
    return made


@pytest.fixture
def board():
    return Board()


@pytest.fixture
def feed(board):
    return Feed(registry(3), lambda: board.state)


def frame_of(feed: Feed, now: float):
    feed.advance(now)
    return feed.frame(now, AlreadySent())[0]


def slot(at: float, slot: int, adapter: int, state: str, reason: SlotReason | None = None) -> SlotChanged:
    return SlotChanged(at=at, slot=Slot(slot), adapter_id=AdapterId(adapter), state=SlotState(state), reason=reason)


def inspected(*standings: AdapterStanding, at: float = 1.0) -> Inspected:
    return Inspected(at=at, steps=7, rows=8, blocks=64, blocks_used=16, slots=2, adapters=standings)


def standing(adapter: int, waiting: int = 0, running: int = 0, reason: str = "") -> AdapterStanding:
    return AdapterStanding(
        adapter_id=AdapterId(adapter),
        waiting=waiting,
        running=running,
        parked=0,
        oldest_at=0.5 if waiting else None,
        reason=reason,
    )


def hold(feed: Feed, adapter: int, waiting: int = 0, admitted: int = 0, asked_at: float = 0.5, engine: int = 0) -> None:
    """Open requests of an adapter at one of several engines."""
    for number in range(waiting + admitted):
        id = RequestId(f"{adapter} {engine} {number}")
        feed.asked(id, AdapterId(adapter), asked_at)
        feed.observe([Routed(request_id=id, at=asked_at, reason="least", engine_id=EngineId(engine))])
        if number >= waiting:
            feed.observe([Admitted(request_id=id, at=1.0, cached_tokens=0)])


def answer(feed: Feed, id: str, adapter: int, *token_times: float, asked_at: float = 0.0, tenant: str = "") -> None:
    feed.asked(RequestId(id), AdapterId(adapter), asked_at, tenant)
    for at in token_times:
        feed.observe([Produced(at=at, request_ids=(RequestId(id),), tokens=(7,), step_s=0.01)])


def test_first_tokens_and_gaps_are_told_in_all_and_per_adapter(feed):
    answer(feed, "one", 1, 0.2, 0.25, 0.3)
    answer(feed, "two", 2, 0.8, asked_at=0.4)
    frame = frame_of(feed, 2.0)

    assert frame.ttft.p50 == pytest.approx(0.2, rel=0.05)
    assert frame.ttft.p99 == pytest.approx(0.4, rel=0.05)
    assert frame.gap.p50 == pytest.approx(0.05, rel=0.05)
    assert frame.step.p50 == pytest.approx(0.01, rel=0.05)
    assert [row.name for row in frame.adapters] == ["letters", "adapter1", "adapter2", "adapter3"]
    assert frame.adapters[2].ttft.p50 == pytest.approx(0.4, rel=0.05)
    assert frame.adapters[3].ttft.p50 is None


def test_a_visible_stall_is_told_once_its_answer_has_ended(feed):
    answer(feed, "one", 1, 0.2, 0.22, 0.9, 1.0)  # read until 0.3 s: the reader stands for 0.6
    answer(feed, "two", 1, 0.2, 0.24)
    answer(feed, "gone", 1, 0.2, 1.2)
    assert frame_of(feed, 2.0).stall == Spread()

    gone = Finished(request_id=RequestId("gone"), at=2.0, reason=FinishReason.ABORT)
    feed.observe([finished("one", 2.0), finished("two", 2.0), gone])
    frame = frame_of(feed, 4.0)
    assert frame.stall.p99 == pytest.approx(0.6, rel=0.05)
    assert frame.stall.p50 < 1e-4, "a text that is there in time is none"
    assert frame.reader_pace == READER_PACE
    assert frame_of(feed, 70.0).stall == Spread()


def test_an_embedding_has_no_reader(feed):
    answer(feed, "one", 1)
    feed.observe([finished("one", 2.0)])
    assert frame_of(feed, 4.0).stall == Spread()


def test_where_nobody_reads_nobody_stands_still():
    feed = Feed(registry(1), lambda: READY, reader_pace=0.0)
    answer(feed, "one", 1, 0.2, 0.9)
    feed.observe([finished("one")])
    frame = frame_of(feed, 2.0)

    assert (frame.stall, frame.reader_pace) == (Spread(), 0.0)
    assert frame.gap.p50 == pytest.approx(0.7, rel=0.05)


def test_the_queue_says_how_many_wait_and_why(feed):
    hold(feed, 0, admitted=1)
    hold(feed, 2, waiting=3)
    feed.observe([inspected(standing(0, running=1), standing(2, waiting=3, reason="its adapter is not in a slot"))])
    frame = frame_of(feed, 1.0)

    assert (frame.waiting, frame.running, frame.blocks_used) == (3, 1, 16)
    assert (frame.adapters[2].waiting, frame.adapters[2].oldest_at) == (3, 0.5)
    assert frame.adapters[2].reason == "its adapter is not in a slot"


def test_whoever_lost_its_slot_since_the_engine_was_asked_is_parked(feed):
    hold(feed, 1, admitted=4)
    feed.observe([slot(0.0, 0, 1, "ready"), inspected(standing(1, running=4)), slot(1.1, 0, 1, "empty")])
    frame = frame_of(feed, 1.2)

    assert (frame.running, frame.parked) == (0, 4)


def test_a_slot_that_is_ready_is_there_for_what_it_was_loaded_for(feed):
    feed.observe([slot(1.0, 0, 2, "loading", SlotReason.TURN_COME), slot(1.5, 0, 2, "ready")])
    frame = frame_of(feed, 2.0)

    assert [(one.state, one.reason, one.begun_at) for one in frame.residents] == [("ready", "its turn has come", 1.5)]
    assert [(one.state, one.ended_at) for one in frame.tenures] == [("loading", 1.5)]


def test_a_reader_is_told_of_a_tenure_once(feed):
    feed.observe([slot(1.0, 0, 1, "ready"), slot(2.0, 0, 1, "empty")])
    first, seen = feed.frame(2.0, AlreadySent())
    feed.observe([slot(3.0, 0, 2, "ready"), slot(4.0, 0, 2, "empty")])
    second, seen = feed.frame(4.0, seen)
    third, _ = feed.frame(4.0, seen)

    assert (first.is_whole, [one.adapter for one in first.tenures]) == (True, [1])
    assert (second.is_whole, [one.adapter for one in second.tenures]) == (False, [2])
    assert third.tenures == ()


def test_charts_are_sent_when_they_have_moved(feed):
    feed.advance(1.0)
    first, seen = feed.frame(1.0, AlreadySent())
    same, seen = feed.frame(1.5, seen)
    feed.advance(2.5)
    moved, _ = feed.frame(2.5, seen)

    assert [frame.charts is None for frame in (first, same, moved)] == [False, True, False]


def test_a_drain_lasts_from_its_start_to_its_end(feed):
    feed.observe([DrainChanged(at=1.0, victim=AdapterId(1), beneficiary=AdapterId(2), state=DrainState.STARTED)])
    during = frame_of(feed, 2.0).drains
    feed.observe([DrainChanged(at=3.0, victim=AdapterId(1), beneficiary=AdapterId(2), state=DrainState.FINISHED)])
    feed.observe([DrainChanged(at=4.0, victim=AdapterId(1), beneficiary=AdapterId(2), state=DrainState.EXPIRED)])
    after = frame_of(feed, 5.0).drains

    assert [(one.victim, one.beneficiary, one.ended_at) for one in during] == [(1, 2, None)]
    assert [(one.state, one.begun_at, one.ended_at) for one in after] == [("finished", 1.0, 3.0)]


def test_the_same_slot_of_two_engines_has_two_residents(feed):
    feed.observe([replace(slot(1.0, 0, 1 + engine, "ready"), engine_id=EngineId(engine)) for engine in (0, 1)])

    assert [(one.engine, one.slot, one.adapter) for one in frame_of(feed, 2.0).residents] == [(0, 0, 1), (1, 0, 2)]


def test_two_engines_are_shown_each_with_its_slots_and_their_requests_in_sum(feed, board):
    board.state = joint_state([READY, replace(READY, capacity=capacity(rows=4, slots=3))])
    feed.observe([replace(slot(1.0, 0, 1, "ready"), engine_id=EngineId(1))])
    hold(feed, 1, waiting=1, admitted=2, engine=0)
    hold(feed, 1, admitted=3, engine=1)
    feed.observe([inspected(), replace(inspected(), engine_id=EngineId(1))])
    frame = frame_of(feed, 2.0)

    assert [(one.id, one.phase, one.slots) for one in frame.engines] == [(0, "ready", 2), (1, "ready", 3)]
    assert (frame.slots, frame.rows, frame.blocks) == (5, 12, 2 * inspected().blocks)
    # The adapter is in a slot of engine 1 only, so what engine 0 has of it is parked.
    assert (frame.waiting, frame.running, frame.parked) == (1, 3, 2)
    assert [(one.waiting, one.running, one.parked) for one in frame.engines] == [(1, 0, 2), (0, 3, 0)]
    assert [row.running for row in frame.adapters if row.id == 1] == [3]


def test_an_engine_that_starts_again_loses_its_lanes_and_the_other_keeps_its_own(feed, board):
    feed.observe([replace(slot(1.0, 0, 1 + engine, "ready"), engine_id=EngineId(engine)) for engine in (0, 1)])
    feed.observe([replace(inspected(standing(1, running=2)), engine_id=EngineId(engine)) for engine in (0, 1)])
    board.state = joint_state([ServiceState(phase=ServicePhase.STARTING, has_served=True), READY])
    frame = frame_of(feed, 2.0)

    assert (frame.phase, [one.phase for one in frame.engines]) == ("ready", ["starting", "ready"])
    assert [(one.engine, one.adapter) for one in frame.residents] == [(1, 2)]
    assert frame.blocks == inspected().blocks


def test_a_pause_is_shown_of_each_engine_until_it_ends_or_the_engine_does(feed, board):
    board.state = joint_state([READY, READY])

    def paused() -> list[bool]:
        return [one.is_paused for one in frame_of(feed, 2.0).engines]

    assert paused() == [False, False]
    feed.observe([PauseChanged(1.0, True, EngineId(engine)) for engine in (0, 1)])
    assert paused() == [True, True]
    feed.observe([PauseChanged(1.5, False, EngineId(0))])
    assert paused() == [False, True]
    feed.observe([EngineRestarted(at=1.6, engine_id=EngineId(1), reason="It died.")])
    assert paused() == [False, False]


def test_a_replica_that_joins_and_waits_is_shown_with_what_it_waits_for(feed, board):
    waits = ServiceState(phase=ServicePhase.STARTING, reason="No GPU is free.", may_last=True)
    board.state = joint_state([READY, waits], first=1)
    frame = frame_of(feed, 2.0)

    assert [(one.id, one.phase, one.reason) for one in frame.engines] == [
        (0, "ready", ""),
        (1, "starting", "No GPU is free."),
    ]


def test_an_engine_that_is_down_keeps_its_lanes_with_nobody_in_them(feed, board):
    feed.observe([slot(1.0, 0, 1, "ready"), inspected(standing(1))])
    assert frame_of(feed, 1.5).slots == 2
    board.state = ServiceState(phase=ServicePhase.DOWN, reason="It ran out of memory.")
    frame = frame_of(feed, 2.0)

    assert (frame.phase, frame.phase_reason) == ("down", "It ran out of memory.")
    assert (frame.residents, frame.slots, frame.blocks) == ((), 2, 0)
    assert [one.ended_at for one in frame.tenures] == [2.0]


def test_an_engine_that_was_away_between_two_moments_has_lost_its_slots_too(feed):
    feed.observe([slot(1.0, 0, 1, "ready"), inspected(), EngineRestarted(at=1.2, reason="It died.")])
    frame = frame_of(feed, 1.5)

    assert (frame.residents, frame.blocks) == ((), 0)


def test_requests_that_wait_while_no_engine_answers_are_told_with_what_they_wait_for(feed, board):
    board.state = ServiceState(phase=ServicePhase.STARTING, reason="The engine starts again.")
    hold(feed, 1, waiting=3, asked_at=0.5)
    frame = frame_of(feed, 2.0)

    assert (frame.waiting, frame.blocks) == (3, 0)
    assert [(row.oldest_at, row.reason) for row in frame.adapters if row.waiting] == [(0.5, "The engine starts again.")]
    assert [(row.state, row.reason) for row in frame.requests] == [("waiting", "The engine starts again.")] * 3


def test_an_hour_of_history_is_there_when_the_engine_is_not(feed, board):
    answer(feed, "one", 1, 0.2, 0.3)
    feed.note_error("engine_died", "It ran out of memory.", at=600.0)
    board.state = ServiceState(phase=ServicePhase.DOWN, reason="It ran out of memory.")
    feed.advance(3000.0)
    hour, _ = feed.frame(3000.0, AlreadySent(), window_s=3600)

    assert (hour.charts.every_s, len(hour.charts.points)) == (30.0, 100)
    assert hour.charts.points[0].ttft.p50 == pytest.approx(0.2, rel=0.05)
    assert hour.charts.points[20].errors_per_min == 2.0
    assert hour.ttft.p50 == pytest.approx(0.2, rel=0.05)


def test_an_adapter_without_a_slot_shows_how_near_it_is_to_one(feed):
    parked = replace(
        standing(1, waiting=1, reason="its adapter is not in a slot"), outlook="its adapter is next in line"
    )
    hold(feed, 1, waiting=1)
    feed.observe([inspected(parked)])
    assert frame_of(feed, 1.0).adapters[1].reason == "its adapter is next in line"

    feed.observe([slot(1.5, 0, 1, "ready")])
    assert "next in line" not in frame_of(feed, 2.0).adapters[1].reason


def test_an_adapter_that_was_unloaded_stays_while_it_has_users(feed):
    hold(feed, 9, waiting=1)
    row = frame_of(feed, 1.0).adapters[-1]

    assert (row.name, row.is_loaded, row.waiting) == ("adapter 9", False, 1)


def test_every_version_has_a_row_and_says_where_it_lies():
    known = Registry("letters", "")
    known.add(LoraPath(name="legal", path="/a/1"))
    new = known.renew(LoraPath(name="legal", path="/a/2"))
    known.add(LoraPath(name="poet", path="/a/3"))
    known.add(LoraPath(name="far", path="s3://bucket/far"))
    known.switch(new)
    feed = Feed(known, lambda: READY)
    feed.observe([host(1, HostState.HELD), host(2, HostState.READING), host(3, HostState.HELD)])
    feed.observe([host(3, HostState.GONE)])
    rows = frame_of(feed, 1.0).adapters[1:]

    assert [(row.name, row.version, row.is_current, row.place) for row in rows] == [
        ("legal", 1, False, "host"),
        ("legal", 2, True, "reading"),
        ("poet", 1, True, "disk"),
        ("far", 1, True, "source"),
    ]
    feed.observe([host(4, HostState.HELD), host(4, HostState.GONE)])
    assert frame_of(feed, 2.0).adapters[-1].place == "disk", "what was read from afar was kept"


def host(adapter: int, state: HostState) -> HostChanged:
    return HostChanged(at=1.0, adapter_id=AdapterId(adapter), state=state)


def test_the_memory_of_an_engine_goes_with_it_and_an_adapter_that_is_gone_is_forgotten(feed, board):
    feed.observe([host(1, HostState.HELD), host(2, HostState.HELD), AdapterRemoved(AdapterId(2), 1.0)])
    assert [row.place for row in frame_of(feed, 1.0).adapters[1:]] == ["host", "disk", "disk"]

    board.state = ServiceState(phase=ServicePhase.DOWN, reason="It ran out of memory.")
    assert frame_of(feed, 2.0).adapters[1].place == "disk"


def test_traffic_has_a_row_for_each_target(feed):
    split = TrafficSplit({"legal@7": 0.95, "legal@8": 0.05})
    route = Route(name="legal", split=split, rollback="legal@7", shadow="legal@9", requests={"legal@7": 3})
    feed.routes = lambda: [route]
    rows = frame_of(feed, 1.0).targets
    assert [(row.name, row.target, row.weight, row.requests) for row in rows] == [
        ("legal", "legal@7", 0.95, 3),
        ("legal", "legal@8", 0.05, 0),
        ("legal", "legal@9", None, 0),
    ]

    route.roll_back("'legal@8' was unloaded.", 1.0)
    first, _ = frame_of(feed, 1.0).targets
    assert (first.target, first.weight, first.note) == ("legal@7", 1.0, "Rolled back: 'legal@8' was unloaded.")


def test_of_very_many_targets_the_first_are_shown(feed):
    routes = [
        Route(name=f"a{number}", split=TrafficSplit({"b": 1.0}), rollback="b") for number in range(MOST_TARGETS + 1)
    ]
    feed.routes = lambda: routes

    assert len(frame_of(feed, 1.0).targets) == MOST_TARGETS


def test_of_very_many_adapters_the_busy_ones_are_listed():
    feed = Feed(registry(MOST_ROWS + 500), lambda: READY)
    busy, seated = MOST_ROWS + 200, MOST_ROWS + 400
    hold(feed, busy, waiting=1)
    feed.observe([slot(0.5, 1, seated, "ready")])
    frame = frame_of(feed, 1.0)

    assert len(frame.adapters) == MOST_ROWS
    assert frame.unlisted == 501
    assert {0, busy, seated} <= {row.id for row in frame.adapters}


def test_a_reader_is_told_of_a_row_again_only_if_it_has_changed():
    known = registry(500)
    feed = Feed(known, lambda: READY)
    feed.advance(1.0)
    first, seen = feed.frame(1.0, AlreadySent())
    hold(feed, 7, waiting=1)
    known.forget("adapter9")
    feed.advance(1.5)
    second, seen = feed.frame(1.5, seen)
    feed.advance(1.75)
    third, _ = feed.frame(1.75, seen)

    assert len(first.adapters) == 501
    assert ([row.id for row in second.adapters], second.gone) == ([7], (9,))
    assert (third.adapters, third.gone) == ((), ())


def test_the_loads_and_the_rank_of_an_adapter_are_told(feed):
    feed.observe([replace(host(1, HostState.HELD), rank=16)])
    for at in (1.0, 2.0, 3.0):
        feed.observe([slot(at, 0, 1, "loading"), slot(at + 0.1, 0, 1, "ready"), slot(at + 0.2, 0, 1, "empty")])
    assert [(row.rank, row.loads) for row in frame_of(feed, 6.0).adapters[1:]] == [(16, 3), (0, 0), (0, 0)]

    assert [(row.rank, row.loads) for row in frame_of(feed, 90.0).adapters[1:]] == [(16, 0), (0, 0), (0, 0)]


def test_an_open_request_says_why_it_waits_in_the_words_of_its_engine(feed):
    feed.observe([slot(0.0, 0, 1, "ready")])
    feed.asked(RequestId("mine#1"), AdapterId(2), 0.5, "ann")
    feed.asked(RequestId("runs#2"), AdapterId(1), 0.2, "bob")
    feed.observe([admitted("runs#2"), inspected(standing(2, waiting=1, reason="its adapter is not in a slot"))])
    feed.observe([Produced(at=1.0, request_ids=(RequestId("runs#2"),), tokens=(7,))])
    rows = frame_of(feed, 1.0).requests
    assert [(row.name, row.tenant, row.adapter, row.state, row.tokens) for row in rows] == [
        ("mine", "ann", 2, "waiting", 0),
        ("runs", "bob", 1, "running", 1),
    ]
    assert [row.reason for row in rows] == ["its adapter is not in a slot", ""]
    assert feed.unclear() == ["mine#1"]

    said = Explained(request_id=RequestId("mine#1"), at=1.0, state=Whereabouts.WAITING, reason="no row is free")
    feed.observe([replace(said, position=2)])
    assert frame_of(feed, 1.2).requests[0].reason == "no row is free; 2 of the same adapter before it"


def test_of_very_many_open_requests_those_that_waited_longest_are_shown(feed):
    for number in range(MOST_SHOWN + 60):
        feed.asked(RequestId(f"r{number}"), AdapterId(1), float(number))
        feed.observe([admitted(f"r{number}")] if number < 30 else [])
    frame = frame_of(feed, 200.0)

    assert (len(frame.requests), frame.unlisted_requests) == (MOST_SHOWN, 60)
    assert frame.requests[0].asked_at == 30.0
    assert {row.state for row in frame.requests} == {"waiting"}


def test_a_tenants_errors_and_limits_are_told(feed):
    feed.used_limits = lambda name, _, waiting: (LimitUse("max_queued", waiting, 4),) if name == "ann" else ()
    feed.asked(RequestId("a"), BASE, 0.5, "ann")
    for kind in ("bad_field", "rate_limited", "rate_limited"):
        feed.note_error(kind, "A sentence.", "ann", at=1.0)
    feed.note_error("bad_field", "A sentence.", "bob", at=1.0)
    ann, bob = frame_of(feed, 4.0).tenants

    assert (ann.errors, ann.limits) == ((("rate_limited", 2), ("bad_field", 1)), (LimitUse("max_queued", 1, 4),))
    assert (bob.errors, bob.limits) == ((("bad_field", 1),), ())


def test_memory_is_bounded_whatever_comes(feed, monkeypatch):
    monkeypatch.setattr(open_requests, "MOST_OPEN", 100)
    for number in range(1000):
        feed.asked(RequestId(str(number)), AdapterId(1), 0.0)
    for number in range(MOST_TENURES + 500):
        feed.observe([slot(1.0 + number * 1e-6, 0, number % 3 + 1, "ready")])
    feed.observe(
        [Produced(at=2.0, request_ids=tuple(RequestId(str(number)) for number in range(1000)), tokens=(7,) * 1000)]
    )
    frame = frame_of(feed, 4.0)

    assert len(frame.tenures) == MOST_TENURES
    assert frame.adapters[1].tokens_per_s * 4.0 == 100


def test_a_request_that_ended_is_forgotten(feed):
    answer(feed, "one", 1, 0.2)
    feed.observe([Finished(request_id=RequestId("one"), at=0.3, reason=FinishReason.STOP)])
    feed.observe([Produced(at=0.5, request_ids=(RequestId("one"),), tokens=(7,))])

    assert frame_of(feed, 2.0).gap.p50 is None


def admitted(id: str, at: float = 1.0) -> Admitted:
    return Admitted(request_id=RequestId(id), at=at, cached_tokens=0)


def finished(id: str, at: float = 1.0) -> Finished:
    return Finished(request_id=RequestId(id), at=at, reason=FinishReason.STOP)


def held(feed: Feed, now: float = 1.0) -> dict[str, tuple[int, int, int]]:
    """By tenant: who waits, runs, is parked."""
    return {row.name: (row.waiting, row.running, row.parked) for row in frame_of(feed, now).tenants}


def test_a_tenants_requests_are_counted_from_their_arrival_to_their_end(feed):
    feed.observe([slot(0.0, 0, 1, "ready")])
    for id, adapter, tenant in [("a1", 1, "ann"), ("a2", 2, "ann"), ("a3", 0, "ann"), ("b1", 0, "bob")]:
        feed.asked(RequestId(id), AdapterId(adapter), 0.0, tenant)
    assert held(feed) == {"ann": (3, 0, 0), "bob": (1, 0, 0)}

    feed.observe([admitted("a1"), admitted("a2"), admitted("b1"), admitted("b1")])
    assert held(feed) == {"ann": (1, 1, 1), "bob": (0, 1, 0)}, "an adapter that is in no slot is parked"

    feed.observe([Preempted(RequestId("a1"), 1.0), finished("b1")])
    assert held(feed) == {"ann": (2, 0, 1)}

    feed.observe([finished("a1"), finished("a2"), finished("a3"), finished("never asked")])
    assert held(feed) == {}


def test_a_tenants_tokens_and_first_tokens_are_those_of_the_window(feed):
    answer(feed, "a", 1, 0.2, 0.3, 0.4, tenant="ann")
    answer(feed, "b", 1, 0.8, tenant="bob")
    feed.observe([finished("a"), finished("b")])
    ann, bob = frame_of(feed, 2.0).tenants

    assert (ann.name, ann.tokens_per_s, bob.tokens_per_s) == ("ann", 1.5, 0.5)
    assert ann.ttft.p50 == pytest.approx(0.2, rel=0.05)
    assert bob.ttft.p50 == pytest.approx(0.8, rel=0.05)
    assert frame_of(feed, 70.0).tenants == ()


def test_a_server_without_keys_has_no_tenants_to_show(feed):
    answer(feed, "a", 1, 0.2)

    assert frame_of(feed, 2.0).tenants == ()


def test_of_many_tenants_the_busy_ones_are_listed(feed):
    for number in range(MOST_TENANTS + 5):
        answer(feed, f"r{number}", 0, 0.5, tenant=f"tenant{number:03d}")
        feed.observe([finished(f"r{number}")])
    feed.asked(RequestId("last"), BASE, 1.0, "zoe")
    frame = frame_of(feed, 2.0)

    assert (len(frame.tenants), frame.unlisted_tenants) == (MOST_TENANTS, 6)
    assert frame.tenants[-1].name == "zoe"


def test_errors_are_counted_by_kind_within_the_window_and_in_all(feed):
    feed.note_error("bad_field", "A field is wrong.", at=1.0)
    feed.note_error("engine_died", "The engine ran out of memory.", at=100.0)
    feed.note_error("bad_field", "A field is missing.", at=101.0)
    first, second = frame_of(feed, 104.0).errors

    assert (first.kind, first.recent, first.total, first.last_at) == ("bad_field", 1, 2, 101.0)
    assert first.sentence == "A field is missing."
    assert (second.kind, second.sentence) == ("engine_died", "The engine ran out of memory.")
    five_minutes, _ = feed.frame(104.0, AlreadySent(), window_s=300)
    assert [one.recent for one in five_minutes.errors] == [2, 1]


def test_restarts_are_told_with_their_reasons(feed):
    for number in range(MOST_RESTARTS + 3):
        feed.observe([EngineRestarted(at=float(number), reason=f"It died {number} times.", engine_id=EngineId(1))])
    frame = frame_of(feed, 20.0)

    assert (len(frame.restarts), frame.restarts_total) == (MOST_RESTARTS, MOST_RESTARTS + 3)
    assert (frame.restarts[-1].engine, frame.restarts[-1].reason) == (1, f"It died {MOST_RESTARTS + 2} times.")


def test_an_engine_that_stands_still_is_shown_with_what_its_requests_wait_for(board, feed):
    still = StoodStill(at=20.0, since=10.0, requests=3, waits_for="reads of adapters (1)")
    board.state = joint_state([READY, replace(READY, standstill=still)])

    assert frame_of(feed, 24.0).notices == (
        "Engine 1 stands still. No step for 14 seconds, while requests wait for reads of adapters (1).",
    )


def test_slots_that_are_too_few_are_noticed_with_the_replica_whose_they_are(board, feed):
    shortage = SlotShortage(EngineId(1), busy=40.0, slots=8, wait_s=12.0, slot_bytes=25_000_000)
    feed.shortages = lambda: [shortage]
    assert frame_of(feed, 1.0).notices == (str(shortage),)

    board.state = joint_state([READY, READY])
    assert frame_of(feed, 2.0).notices == (f"Replica 1: {shortage}",)


def test_a_request_that_was_moved_is_its_new_versions(feed):
    hold(feed, 1, waiting=1)
    versions = {"old": AdapterId(1), "new": AdapterId(2), "old_version": 1, "new_version": 2}
    feed.observe([Moved(request_id=RequestId("1 0 0"), at=1.0, output_tokens=0, **versions)])

    assert [row.waiting for row in frame_of(feed, 2.0).adapters] == [0, 0, 1, 0]


def test_what_is_told_of_trouble_is_bounded(feed):
    for number in range(MOST_KINDS + 20):
        feed.note_error(f"kind{number}", "x" * 10_000, at=1.0)
    errors = frame_of(feed, 4.0).errors

    assert len(errors) == MOST_KINDS
    assert max(len(one.sentence) for one in errors) == 300


def test_figures_and_charts_are_of_the_same_time(feed):
    for second in range(0, 200, 2):
        answer(feed, f"r{second}", 1, second + (0.1 if second < 100 else 0.4), asked_at=float(second))
        feed.observe([finished(f"r{second}", second + 1.0)])
    feed.advance(200.0)
    minute, _ = feed.frame(200.0, AlreadySent(), window_s=60)
    five, _ = feed.frame(200.0, AlreadySent(), window_s=300)

    assert (len(minute.charts.points), len(five.charts.points)) == (30, 100)
    assert (minute.window_s, five.window_s) == (60, 300)
    assert minute.ttft.p50 == pytest.approx(0.4, rel=0.05)
    assert five.ttft.p50 == pytest.approx(0.1, rel=0.05)
    assert minute.mean_tokens_per_s == five.mean_tokens_per_s == 0.5
