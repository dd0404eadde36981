"""What a router knows of replicas, in columns: every choice is that of the plain rule, and costs the same for many."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

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
from rota.policy.routing import TO_AND_FRO, Prices, RouteReason, RoutingChoice
from rota.runtime.replicas.replica_state import BUSY, FIRST_TOKEN_S, IN_HOST, IN_SLOT, Columns, Pace
from rota.runtime.replicas.router import Router
from tests.builders import request
from tests.counting import calls_in
from tests.runtime.replicas.plain_rule import PlainlyChecked, ReplicaView, route

# ── the plain rule ────────────────────────────────────────────────────────────────────────────────────────────────────

PRICES = Prices(load_s=0.002, fetch_s=0.05, token_s=0.00002)
LOAD_S, ABSENT_S = TO_AND_FRO * 0.002, TO_AND_FRO * 0.052


def views(*fields: dict[str, Any]) -> list[ReplicaView]:
    return [ReplicaView(number=number, **one) for number, one in enumerate(fields)]


SLOT = {"has_slot": True, "has_host_copy": True}
HOST = {"has_host_copy": True}
DOWN = {"is_up": False}


@pytest.mark.parametrize(
    ("fields", "replica", "reason"),
    [
        pytest.param([{}, SLOT], 1, RouteReason.IN_SLOT, id="a slot goes before nothing"),
        pytest.param([HOST, SLOT], 1, RouteReason.IN_SLOT, id="a slot goes before host memory"),
        pytest.param([HOST, {**SLOT, "queue_s": 0.9 * LOAD_S}], 1, RouteReason.IN_SLOT, id="a load costs more"),
        pytest.param([HOST, {**SLOT, "queue_s": 1.1 * LOAD_S}], 0, RouteReason.HOLDERS_BUSY, id="the queue costs more"),
        pytest.param([{}, {**SLOT, "queue_s": 1.1 * LOAD_S}], 1, RouteReason.IN_SLOT, id="a read costs more still"),
        pytest.param([{}, {**SLOT, "queue_s": 1.1 * ABSENT_S}], 0, RouteReason.HOLDERS_BUSY, id="too hot: one more"),
        pytest.param([{}, HOST], 1, RouteReason.IN_HOST_MEMORY, id="host memory goes before nothing"),
        pytest.param([{}, {**HOST, "queue_s": 1.0}], 0, RouteReason.HOLDERS_BUSY, id="another copy in host memory"),
        pytest.param([SLOT, {**SLOT, "prefix_tokens": 64}], 1, RouteReason.IN_SLOT, id="of two holders the prefix"),
        pytest.param([{}, {"prefix_tokens": 64}], 1, RouteReason.CACHED_PREFIX, id="a prefix goes before nothing"),
        pytest.param([{"prefix_tokens": 64}, {"prefix_tokens": 512}], 1, RouteReason.CACHED_PREFIX, id="the longest"),
        pytest.param([{"queue_s": 0.2}, {"queue_s": 0.1}], 1, RouteReason.SHORTEST_QUEUE, id="the shortest queue"),
        pytest.param([{"queue_s": 0.1}, {"queue_s": 0.1}], 0, RouteReason.LOWEST_NUMBER, id="all alike"),
        pytest.param([{**SLOT, "pause_s": 0.3}, HOST], 1, RouteReason.HOLDERS_BUSY, id="too many adapters in turn"),
        pytest.param([{**SLOT, **DOWN}, {}, {}], 1, RouteReason.LOWEST_NUMBER, id="a holder that is down is none"),
        pytest.param([SLOT | DOWN, {"queue_s": 9.0}], 1, RouteReason.ONLY_ONE, id="no other is up"),
    ],
)
def test_the_replica_that_costs_a_request_least_takes_it(fields, replica, reason):
    assert route(views(*fields), PRICES) == RoutingChoice(replica, reason)


def test_a_request_for_the_base_model_pays_for_no_adapter():
    found = route(views({"pause_s": 1.0}, {**SLOT, "queue_s": 0.001}), PRICES, needs_adapter=False)

    assert found == RoutingChoice(0, RouteReason.SHORTEST_QUEUE)


def test_a_cached_prefix_is_worth_what_its_tokens_take_to_compute():
    near, far = ({"queue_s": queue_s, "prefix_tokens": 512} for queue_s in (0.01, 0.011))

    assert route(views({}, near), PRICES, needs_adapter=False) == RoutingChoice(1, RouteReason.CACHED_PREFIX)
    assert route(views({}, far), PRICES, needs_adapter=False) == RoutingChoice(0, RouteReason.SHORTEST_QUEUE)


def test_where_no_replica_is_up_there_is_no_choice():
    assert route(views(DOWN, DOWN), PRICES) is None


SECONDS = st.floats(0.0, 10.0)
VIEWS = st.lists(
    st.fixed_dictionaries(
        {
            "is_up": st.booleans(),
            "queue_s": SECONDS,
            "pause_s": SECONDS,
            "has_slot": st.booleans(),
            "has_host_copy": st.booleans(),
            "prefix_tokens": st.integers(0, 4096),
        }
    ),
    min_size=1,
    max_size=16,
).map(lambda fields: views(*fields))


@given(VIEWS, st.booleans())
def test_no_replica_that_is_down_takes_a_request_and_the_same_views_give_the_same_choice(found, needs_adapter):
    choice = route(found, PRICES, needs_adapter)

    if any(view.is_up for view in found):
        assert choice is not None
        assert found[choice.replica].is_up
    else:
        assert choice is None
    assert route(found, PRICES, needs_adapter) == choice


@given(VIEWS)
def test_a_replica_that_gains_in_any_way_keeps_the_request(found):
    choice = route(found, PRICES)
    if choice is None:
        return
    taker = found[choice.replica]
    taker.has_slot = taker.has_host_copy = True
    taker.queue_s, taker.pause_s, taker.prefix_tokens = 0.5 * taker.queue_s, 0.0, taker.prefix_tokens + 64

    again = route(found, PRICES)
    assert again is not None
    assert again.replica == choice.replica


# ── columns ───────────────────────────────────────────────────────────────────────────────────────────────────────────

TEXT = tuple(range(3, 700))
ADAPTERS = 6

ACTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["ask"] * 6 + ["end", "end", "step", "step", "slot", "slot", "host", "down", "up", "lost", "add"]
        ),
        st.integers(0, 10**6),
    ),
    min_size=20,
    max_size=150,
)


def slot_event(dice: int) -> Event:
    states, reasons = [*SlotState], [None, SlotReason.TURN_OVER, SlotReason.IDLE]
    return SlotChanged(
        at=dice / 1e6,
        slot=Slot(dice % 3),
        adapter_id=AdapterId(1 + dice // 3 % ADAPTERS),
        state=states[dice // 50 % len(states)],
        reason=reasons[dice // 500 % 3],
    )


def host_event(dice: int) -> Event:
    states = [*HostState]
    adapter_id = AdapterId(1 + dice // 3 % ADAPTERS)
    return HostChanged(at=dice / 1e6, adapter_id=adapter_id, state=states[dice // 50 % len(states)])


def step_event(opened: list[RequestId], dice: int) -> Event:
    ids = tuple(opened[dice % len(opened) :][:4])
    return Produced(
        at=0.0, request_ids=ids, tokens=(7,) * len(ids), step_s=0.001 * (1 + dice % 30), prompt_tokens=dice % 200
    )


def ask(router: Router, number: int, dice: int) -> list[RequestId]:
    """Prompts begin alike, some for longer than others. Which adapter: any, or the base model."""
    shared = (0, 70, 200, 600)[dice // 7 % 4]
    own = request(
        f"r{number}",
        prompt=(*TEXT[:shared], number, *TEXT[: dice % 40]),
        adapter=AdapterId(dice // 31 % (ADAPTERS + 1)),
        max_new_tokens=1 + dice % 300,
        cache_scope=("", "acme")[dice // 97 % 2],
    )
    with suppress(RequestError):  # none is up
        router.route(own, 0.0, without=(0,) if dice % 11 == 0 else ())
        return [own.request_id]
    return []


def play(router: Router, replicas: int, acts: list[tuple[str, int]]) -> None:
    """A random history of a few replicas."""
    opened: list[RequestId] = []
    for number, (act, dice) in enumerate(acts):
        replica = dice % replicas
        if act == "add":
            replicas = router.add() + 1
        elif act == "ask":
            opened += ask(router, number, dice)
        elif act == "down":
            router.note_down(replica)
        elif act == "up":
            router.note_up(replica)
        elif act == "lost":
            router.note_events(replica, [CacheFlushed(0.0, 1) if dice % 2 else EngineRestarted(at=0.0, reason="")])
        elif act == "slot":
            router.note_events(replica, [slot_event(dice)])
        elif act == "host":
            router.note_events(replica, [host_event(dice)])
        elif opened:
            request_id = opened[dice % len(opened)]
            at = router.replica_of(request_id)
            ended = Finished(request_id=request_id, at=0.0, reason=FinishReason.STOP, output_tokens=dice % 400)
            admitted = Admitted(request_id=request_id, at=0.0, cached_tokens=0)
            router.note_events(
                replica if at is None else at, [admitted, ended if act == "end" else step_event(opened, dice)]
            )


@settings(max_examples=150)
@given(ACTS, st.integers(1, 9), st.booleans())
def test_over_any_history_every_choice_is_that_of_the_plain_rule(acts, replicas, has_prefix_cache):
    router = PlainlyChecked(replicas, has_prefix_cache=has_prefix_cache)
    play(router, replicas, acts)

    assert router.checked == sum(act == "ask" for act, _ in acts)


def test_a_history_has_choices_of_every_kind():
    """What the test above holds against each other is not always the same."""
    router = PlainlyChecked(4)
    dice = 12345
    acts = []
    kinds = ("ask", "slot", "ask", "host", "ask", "end", "step", "ask", "ask", "down", "up", "ask", "lost")
    for number in range(3000):
        dice = dice * 1103515245 % 2**31
        acts.append((kinds[number % len(kinds)], dice // 16))
    play(router, 4, acts)

    assert {reason for _, reason in router.routed} >= {*RouteReason} - {RouteReason.IN_TURN, RouteReason.ONLY_ONE}
    assert max(books.slot_count for books in router._replicas) > 0


@pytest.mark.parametrize(
    ("ways", "reason"),
    [
        ([0, IN_HOST, IN_SLOT], RoutingChoice(2, RouteReason.IN_SLOT)),
        ([0, IN_HOST, 0], RoutingChoice(1, RouteReason.IN_HOST_MEMORY)),
        ([0, BUSY, IN_HOST], RoutingChoice(1, RouteReason.IN_SLOT)),
        ([0, 0, 0], RoutingChoice(0, RouteReason.LOWEST_NUMBER)),
    ],
)
def test_columns_tell_what_replicas_hold(ways, reason):
    columns = Columns(3)
    for replica, way in enumerate(ways):
        if way:
            columns.hold(replica, AdapterId(7), way)

    assert columns.cheapest(AdapterId(7), PRICES, 1.0, None) == reason
    assert columns.cheapest(BASE, PRICES, 1.0, None) == RoutingChoice(0, RouteReason.LOWEST_NUMBER)


def test_an_adapter_that_nobody_holds_any_more_leaves_no_row():
    columns = Columns(2)
    for replica in (0, 1):
        columns.hold(replica, AdapterId(7), IN_HOST)
        columns.hold(replica, AdapterId(7), IN_SLOT)
    columns.drop(0, AdapterId(7), IN_SLOT)
    columns.drop(1, AdapterId(7))
    assert columns.rows == 1

    columns.drop(0, AdapterId(7), IN_HOST)
    assert columns.rows == 0


def test_a_replica_more_holds_nothing_and_takes_requests_once_it_is_up():
    columns = Columns(1)
    columns.hold(0, AdapterId(7), IN_SLOT)
    columns.queue_tokens[0] = 1.0 / PRICES.token_s
    columns.add()
    assert columns.cheapest(AdapterId(7), PRICES, 1.0, None) == RoutingChoice(0, RouteReason.ONLY_ONE)

    columns.set_up(1, True)
    assert columns.cheapest(AdapterId(7), PRICES, 1.0, None) == RoutingChoice(1, RouteReason.HOLDERS_BUSY)


def test_a_choice_among_512_replicas_makes_no_more_calls_than_one_among_four():
    """The microseconds are in benchmarks/routing_cost.py."""
    few, many = Router(4), Router(512)
    for router in (few, many):
        for number in range(64):
            router.route(request(f"r{number}", adapter=AdapterId(1 + number % 5)), 0.0)
    new = request("new", adapter=AdapterId(3))

    assert calls_in(partial(many.route, new, 0.0))[0] == calls_in(partial(few.route, new, 0.0))[0]


# ── what a token costs ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_token_costs_what_it_adds_to_a_step_and_not_its_share_of_the_fixed_part():
    pace = Pace()
    for tokens in (8, 64, 300, 8, 16, 500) * 20:
        pace.note(tokens, 0.005 + 0.00002 * tokens)

    assert pace.token_s == pytest.approx(0.00002)
    assert 0.005 < pace.step_s < 0.015


def test_where_all_steps_are_alike_a_token_costs_a_part_of_its_share():
    pace = Pace()
    for _ in range(100):
        pace.note(50, 0.01)

    assert 0.0 < pace.token_s < 0.01 / 50


@pytest.mark.parametrize("steps", [[], [(0, 0.01)] * 50, [(4, 0.01)] * 3], ids=["none", "without tokens", "too few"])
def test_before_anything_was_measured_a_token_costs_something(steps):
    pace = Pace()
    for tokens, seconds in steps:
        pace.note(tokens, seconds)

    assert pace.token_s == FIRST_TOKEN_S


def test_a_pace_follows_a_device_that_becomes_slower():
    pace = Pace()
    for factor in (1.0, 3.0):
        for tokens in (8, 64, 300) * 700:
            pace.note(tokens, factor * (0.005 + 0.00002 * tokens))

    assert pace.token_s == pytest.approx(0.00006, rel=0.1)
