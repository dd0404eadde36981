from __future__ import annotations

from contextlib import suppress
from functools import partial

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
from rota.policy.routing import Prices, RouteReason, RoutingChoice
from rota.runtime.replicas.replica_state import BUSY, IN_HOST, IN_SLOT, Columns
from rota.runtime.replicas.router import Router
from tests.builders import request
from tests.counting import calls_in
from tests.runtime.routing.plain import PlainlyChecked

TEXT = tuple(range(3, 700))
PRICES = Prices(load_s=0.002, fetch_s=0.05, token_s=0.00002)
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
