"""Requests go where they wait least, and where their adapters and the beginnings of their prompts are."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.core.errors import RequestError
from rota.core.events import (
    Admitted,
    CacheFlushed,
    EngineRestarted,
    Event,
    Finished,
    FinishReason,
    HostChanged,
    HostState,
    Produced,
    SlotChanged,
    SlotReason,
    SlotState,
)
from rota.core.ids import BASE, AdapterId, RequestId, Slot
from rota.core.request import Request
from rota.policy.routing import RouteReason
from rota.runtime.replicas.router import ENDS, PrefixIndex, Router, Rule
from tests.builders import request
from tests.counting import calls_in

RULES: tuple[Rule, ...] = get_args(Rule)


def in_slot(adapter: int, slot: int = 0, at: float = 0.0, state: SlotState = SlotState.READY, **fields: Any) -> Event:
    return SlotChanged(at=at, slot=Slot(slot), adapter_id=AdapterId(adapter), state=state, **fields)


def in_host(adapter: int, state: HostState = HostState.HELD, at: float = 0.0) -> Event:
    return HostChanged(at=at, adapter_id=AdapterId(adapter), state=state)


def finished(id: str, output_tokens: int = 4) -> Event:
    return Finished(request_id=RequestId(id), at=0.0, reason=FinishReason.LENGTH, output_tokens=output_tokens)


def ask(router: Router, id: str, adapter: int = 0, **fields: Any) -> int:
    return router.route(request(id, adapter=AdapterId(adapter), **fields), 0.0).replica


@pytest.mark.parametrize("rule", RULES)
def test_requests_that_are_alike_are_spread_evenly(rule):
    router = Router(4, rule)
    taken = Counter(ask(router, f"r{number}") for number in range(40))

    assert taken == dict.fromkeys(range(4), 10)


def test_what_a_token_costs_counts_for_all_replicas_alike_also_for_one_that_has_said_nothing_since():
    router = Router(2)
    assert [ask(router, f"r{number}") for number in range(4)] == [0, 1, 0, 1]
    token = Produced(at=0.0, request_ids=(RequestId("r0"),), tokens=(7,), step_s=5.0)
    router.note_events(0, [token] * 40)  # steps are slow, and only this replica has told of it

    assert ask(router, "next") == 0


def test_an_adapter_stays_where_it_is_while_its_replica_is_hardly_busier():
    router = Router(3)
    router.note_events(2, [in_host(7), in_slot(7)])

    assert [ask(router, f"r{number}", adapter=7) for number in range(5)] == [2] * 5


def test_an_adapter_that_is_too_hot_for_its_holder_gets_another():
    router = Router(2)
    router.note_events(1, [in_host(7), in_slot(7)])
    choices = [router.route(request(f"r{n}", adapter=AdapterId(7), max_new_tokens=400), 0.0) for n in range(80)]

    assert {choice.replica for choice in choices} == {0, 1}
    assert choices[0].reason is RouteReason.IN_SLOT
    other = next(choice for choice in choices if choice.replica == 0)
    assert other.reason is RouteReason.HOLDERS_BUSY
    # Now it has a turn there too, so the next requests go to whichever is less busy.
    assert Counter(choice.replica for choice in choices[-10:]) == {0: 5, 1: 5}


@pytest.mark.parametrize(
    ("events", "replica"),
    [
        pytest.param([in_host(7)], 1, id="held in host memory"),
        pytest.param([in_host(7, HostState.READING)], 1, id="being read"),
        pytest.param([in_host(7), in_host(7, HostState.GONE)], 0, id="no longer held"),
        pytest.param([in_host(7), in_slot(7, state=SlotState.LOADING)], 1, id="being copied"),
        pytest.param([in_slot(7), in_slot(7, state=SlotState.EMPTY)], 0, id="no longer in a slot"),
        pytest.param([in_host(7), EngineRestarted(at=0.0, reason="")], 0, id="lost with the engine"),
    ],
)
def test_what_events_tell_of_an_adapter_decides(events, replica):
    router = Router(2)
    router.note_events(1, events)

    assert ask(router, "r0", adapter=7) == replica


def test_a_prompt_goes_where_its_beginning_was_computed_until_the_cache_is_gone():
    text = tuple(range(3, 700))
    router, blind = Router(2), Router(2, has_prefix_cache=False)
    for one in (router, blind):
        assert ask(one, "first", prompt=text, max_new_tokens=100) == 0
        one.note_events(0, [Admitted(request_id=RequestId("first"), at=0.0, cached_tokens=0)])

    assert ask(blind, "again", prompt=(*text, 1)) == 1
    assert ask(router, "again", prompt=(*text, 1)) == 0
    assert router.routed[0, RouteReason.CACHED_PREFIX] == 1
    router.note_events(0, [CacheFlushed(0.0, 9)])
    assert ask(router, "once more", prompt=(*text, 2)) == 1


def test_a_crowded_replica_is_left_for_one_with_slots_to_spare():
    router = Router(2)
    for replica in (0, 1):
        router.note_events(replica, [in_host(number) for number in range(1, 9)])
    # Two slots, seen full: an adapter has to leave for another.
    router.note_events(0, [in_slot(1, 0), in_slot(2, 1), in_slot(1, 0, state=SlotState.EMPTY, reason=SlotReason.IDLE)])
    router.note_events(0, [in_slot(3, 0)])
    for number in (2, 3, 4):
        router.book(0, request(f"busy{number}", adapter=AdapterId(number), max_new_tokens=9))

    assert ask(router, "new", adapter=5) == 1
    assert ask(router, "own", adapter=4) == 1, "its own adapter has to pause there too"


def test_a_replica_that_is_down_takes_nothing_and_comes_back_empty():
    router = Router(2)
    router.note_events(0, [in_host(7), in_slot(7)])
    assert ask(router, "lost", adapter=7) == 0
    router.note_down(0)

    assert router.replica_of(RequestId("lost")) is None
    assert [ask(router, f"r{number}", adapter=7) for number in range(20)] == [1] * 20
    assert router.routed[1, RouteReason.ONLY_ONE] == 20
    late = Produced(at=0.0, request_ids=(RequestId("lost"),), tokens=(7,), step_s=0.01)
    router.note_events(0, [late, finished("lost"), EngineRestarted(at=0.0, reason="it died"), in_host(8)])
    router.note_up(0)
    assert ask(router, "base") == 0
    assert ask(router, "known before it was up", adapter=8) == 0


def test_in_turn_every_replica_that_is_up_comes_once_a_round():
    router = Router(4, "round-robin")
    router.note_down(1)

    assert [ask(router, f"r{number}") for number in range(6)] == [0, 2, 3, 0, 2, 3]


@pytest.mark.parametrize(
    ("busy", "replica", "reason"),
    [((2, 1), 1, RouteReason.SHORTEST_QUEUE), ((1, 1), 0, RouteReason.LOWEST_NUMBER)],
)
def test_the_shortest_queue_is_taken_whatever_replicas_hold(busy, replica, reason):
    router = Router(2, "shortest-queue")
    router.note_events(0, [in_host(7), in_slot(7)])
    for number, requests in enumerate(busy):
        for place in range(requests):
            router.book(number, request(f"busy{number}-{place}"))
    ask(router, "next", adapter=7)

    assert router.routed == {(replica, reason): 1}


@pytest.mark.parametrize("rule", RULES)
def test_where_no_replica_is_up_a_request_is_refused_with_a_sentence(rule):
    router = Router(2, rule)
    for replica in (0, 1):
        router.note_down(replica)

    with pytest.raises(RequestError, match="No replica is up"):
        ask(router, "r0")


def test_requests_that_ended_no_longer_count_whatever_they_were_expected_to_take():
    router = Router(2)
    long = [ask(router, f"r{number}", max_new_tokens=400, prompt=9) for number in range(20)]
    for number, replica in enumerate(long):
        if replica == 0:
            events = [
                Admitted(request_id=RequestId(f"r{number}"), at=0.0, cached_tokens=0),
                finished(f"r{number}", 399),
            ]
            router.note_events(0, events)

    assert [ask(router, f"s{number}") for number in range(10)] == [0] * 10


def test_answers_that_run_longer_than_expected_still_count():
    router = Router(2)
    assert ask(router, "endless", max_new_tokens=4096) == 0
    assert ask(router, "short", max_new_tokens=1, prompt=1) == 1
    for _ in range(2000):
        router.note_events(0, [Produced(at=0.0, request_ids=(RequestId("endless"),), tokens=(7,), step_s=0.01)])

    assert ask(router, "next") == 1


def test_a_request_that_is_routed_again_is_open_once():
    router = Router(2)
    for _ in range(5):
        ask(router, "again", max_new_tokens=50)
    replica = router.replica_of(RequestId("again"))
    router.note_events(replica or 0, [finished("again")])

    assert [books.open_tokens for books in router._replicas] == [0, 0]


def test_requests_for_the_base_model_take_no_slot_from_adapters():
    router = Router(2)
    router.note_events(0, [in_slot(1, 0), in_slot(2, 1), in_slot(1, 0, state=SlotState.EMPTY, reason=SlotReason.IDLE)])
    router.note_events(0, [in_slot(3, 0), in_host(2), in_host(3)])
    for number, adapter in enumerate((2, 3, 0)):
        router.book(0, request(f"busy{number}", adapter=AdapterId(adapter), max_new_tokens=1))

    assert router._columns._crowd[:, 0].tolist() == [0.25, 0.0], "two adapters on two slots: only a third would wait"


def test_routed_requests_are_counted_by_replica_and_reason():
    router = Router(2, "round-robin")
    for number in range(5):
        ask(router, f"r{number}")

    assert router.routed == {(0, RouteReason.IN_TURN): 3, (1, RouteReason.IN_TURN): 2}


def test_a_replica_that_joins_holds_nothing_and_takes_work_once_it_is_up():
    router = Router(2)
    router.note_events(0, [in_host(7), in_slot(7)])
    for number in range(6):
        ask(router, f"r{number}", max_new_tokens=400)
    assert router.add() == 2
    assert ask(router, "early") != 2

    router.note_up(2)
    assert [ask(router, f"s{number}", max_new_tokens=1) for number in range(3)] == [2, 2, 2]  # its queue is empty
    assert ask(router, "own", adapter=7, max_new_tokens=1) == 0, "an adapter stays with its holder"


def test_replicas_that_may_not_have_a_request_are_left_out_of_this_choice_only():
    router = Router(3)
    router.note_events(1, [in_host(7), in_slot(7)])

    assert router.route(request("r0", adapter=AdapterId(7)), 0.0, without=[1]).replica == 0
    assert ask(router, "r1", adapter=7) == 1
    with pytest.raises(RequestError, match="No replica is up"):
        router.route(request("r2"), 0.0, without=[0, 1, 2])
    router.note_down(2)
    router.route(request("r3"), 0.0, without=[2])
    assert [ask(router, f"s{number}", prompt=1000) for number in range(4)].count(2) == 0, "it is still down"


# ── any traffic ──────────────────────────────────────────────────────────────────────────────────────────────────────

ACTS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "end", "token", "slot", "host", "down", "up"]), st.integers(0, 999)
    ),
    max_size=80,
)


def play(router: Router, acts: list[tuple[str, int]], replicas: int, name: str = "r") -> list[int | None]:
    """Random events of a few replicas and adapters; gives where each request went."""
    taken: list[int | None] = []
    opened: list[RequestId] = []
    up = set(range(replicas))
    for number, (act, dice) in enumerate(acts):
        replica, adapter = dice % replicas, dice % 5
        if act == "ask":
            try:
                taken.append(ask(router, f"{name}{number}", adapter=adapter, prompt=1 + dice % 90))
                assert taken[-1] in up
                opened.append(RequestId(f"{name}{number}"))
            except RequestError:
                assert not up
                taken.append(None)
        elif act in ("end", "token") and opened:
            request_id = opened[dice % len(opened)]
            at = router.replica_of(request_id)
            token = Produced(at=0.0, request_ids=(request_id,), tokens=(7,), step_s=0.01)
            router.note_events(replica if at is None else at, [finished(request_id) if act == "end" else token])
        elif act == "slot":
            router.note_events(replica, [in_slot(adapter, dice % 2, state=random.Random(dice).choice([*SlotState]))])
        elif act == "host":
            router.note_events(replica, [in_host(adapter, random.Random(dice).choice([*HostState]))])
        elif act == "down":
            router.note_down(replica)
            up.discard(replica)
        elif act == "up":
            router.note_up(replica)
            up.add(replica)
    return taken


@settings(max_examples=60)
@given(ACTS, st.sampled_from(RULES), st.integers(1, 4))
def test_only_replicas_that_are_up_are_chosen_and_the_same_events_give_the_same_choices(acts, rule, replicas):
    assert play(Router(replicas, rule), acts, replicas) == play(Router(replicas, rule), acts, replicas)


@settings(max_examples=60)
@given(ACTS, st.integers(1, 4))
def test_when_all_requests_have_ended_nothing_is_left_of_them(acts, replicas):
    router = Router(replicas)
    play(router, acts, replicas)
    for number in range(len(acts)):
        if (replica := router.replica_of(RequestId(f"r{number}"))) is not None:
            router.note_events(replica, [finished(f"r{number}")])

    assert not router._at
    for books in router._replicas:
        assert (books.open_tokens, books.busy, list(books.open_requests)) == (0, {}, [])


@settings(max_examples=100)
@given(ACTS, ACTS, st.sampled_from(RULES), st.integers(1, 3), st.integers(1, 3))
def test_a_router_that_grew_chooses_as_one_that_had_all_replicas_from_the_start(before, after, rule, first, more):
    grown, whole = Router(first, rule), Router(first + more, rule)
    for number in range(first, first + more):
        whole.note_down(number)
    assert play(grown, before, first) == play(whole, before, first)
    for number in range(first, first + more):
        assert grown.add() == number
    for router in (grown, whole):
        for number in range(first + more):
            router.note_up(number)

    assert play(grown, after, first + more, "later") == play(whole, after, first + more, "later")


def test_what_is_known_of_adapters_is_bounded_by_what_replicas_hold():
    """Ten thousand adapters come, are asked once and go."""
    router = Router(2)
    for number in range(1, 10_001):
        replica = ask(router, f"r{number}", adapter=number)
        seated = [in_host(number, HostState.READING), in_host(number), in_slot(number, number % 4)]
        left = [in_slot(number, number % 4, state=SlotState.EMPTY), in_host(number, HostState.GONE)]
        router.note_events(replica, [*seated, finished(f"r{number}"), *left])

    books = router._replicas[0]
    kept = [books.busy, books._resident, books._reading, books._open, router._at]
    assert [len(one) for one in kept] == [0] * len(kept)
    assert router._columns.rows == 0


# ── what it costs ────────────────────────────────────────────────────────────────────────────────────────────────────


def crowded(adapters: int, replicas: int = 16) -> Router:
    router = Router(replicas)
    for replica in range(replicas):
        router.note_events(replica, [in_host(number) for number in range(1, adapters + 1)])
    for number in range(2 * adapters):
        ask(router, f"r{number}", adapter=1 + number % adapters)
    return router


def test_a_choice_costs_the_same_for_a_thousand_adapters_and_four_times_the_replicas():
    """The microseconds are in benchmarks/routing_cost.py."""
    routers = (crowded(10), crowded(1000), crowded(10, replicas=4))
    few, many, narrow = (calls_in(partial(ask, router, "new", adapter=5))[0] for router in routers)

    assert many <= few + 5
    assert many - narrow <= 5


def test_base_requests_do_not_ask_about_adapters():
    router = Router(2)
    router.note_events(1, [in_host(7), in_slot(7)])

    assert router.route(request("r0", adapter=BASE), 0.0).reason is RouteReason.LOWEST_NUMBER


# ── beginnings of prompts ─────────────────────────────────────────────────────────────────────────────────────────────

TEXT = tuple(range(3, 3 + 5000))


def seen(index: PrefixIndex, asked: Request, replicas: int = 3) -> list[int]:
    """How many tokens of a prompt each replica has seen."""
    found = index.seen(index.keys_of(asked), replicas)
    return [0] * replicas if found is None else [int(tokens) for tokens in found]


def note(index: PrefixIndex, asked: Request, replica: int) -> None:
    index.note(index.keys_of(asked), replica)


def test_a_replica_is_known_by_the_longest_beginning_it_has_seen():
    index = PrefixIndex()
    note(index, request(prompt=TEXT[:300]), 1)
    note(index, request(prompt=(*TEXT[:130], *range(9000, 9400))), 2)

    assert seen(index, request(prompt=TEXT[:1000])) == [0, 256, 128]


def test_adapters_and_cache_scopes_share_no_beginnings():
    index = PrefixIndex()
    note(index, request(prompt=TEXT[:300]), 1)

    assert seen(index, request(prompt=TEXT[:300], adapter=AdapterId(1))) == [0, 0, 0]
    assert seen(index, request(prompt=TEXT[:300], cache_scope="acme")) == [0, 0, 0]
    assert seen(index, request(prompt=TEXT[:63])) == [0, 0, 0]


def test_a_replica_that_lost_its_kv_has_seen_nothing_and_the_others_have():
    index = PrefixIndex()
    for replica in (0, 1):
        note(index, request(prompt=TEXT[:300]), replica)
    index.forget(0)

    assert seen(index, request(prompt=TEXT[:300])) == [0, 256, 0]


def test_the_index_is_bounded_and_forgets_first_what_was_not_asked_for_longest():
    index = PrefixIndex(most=6)
    for first in (1, 2, 3, 1, 4):
        note(index, request(prompt=(first, *TEXT[:127])), 0)

    assert len(index) == 6
    assert [seen(index, request(prompt=(first, *TEXT[:127])))[0] for first in (1, 2, 3, 4)] == [128, 0, 128, 128]


def test_a_long_prompt_is_hashed_no_further_than_the_last_end():
    index = PrefixIndex()
    short, long = (request(prompt=tuple(range(3, 3 + tokens))) for tokens in (ENDS[-1], 100_000))

    assert index.keys_of(short) == index.keys_of(long)
    assert calls_in(lambda: index.keys_of(long))[0] <= 10
