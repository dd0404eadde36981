from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.policy.routing import TO_AND_FRO, Prices, RouteReason, RoutingChoice
from tests.runtime.routing.plain import ReplicaView, route

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
