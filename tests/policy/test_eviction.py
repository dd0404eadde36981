from __future__ import annotations

import pytest

from rota.policy.eviction import Eviction


def leaver(policy, used, candidates):
    order = Eviction(policy)
    for adapter_id in used:
        order.use(adapter_id)
    return order.choose(candidates)


@pytest.mark.parametrize(("policy", "first"), [("lru", 2), ("fifo", 1)])
def test_using_one_again_saves_it_from_lru_and_not_from_fifo(policy, first):
    assert leaver(policy, used=(1, 2, 3, 1), candidates=(1, 2, 3)) == first


@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_only_candidates_leave(policy):
    assert leaver(policy, used=(1, 2, 3), candidates=(2, 3)) == 2


@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_the_order_of_candidates_does_not_matter(policy):
    assert leaver(policy, used=(3, 1, 2), candidates=(1, 2, 3)) == 3
    assert leaver(policy, used=(3, 1, 2), candidates=(2, 3, 1)) == 3


@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_one_that_is_gone_is_forgotten(policy):
    order = Eviction(policy)
    for adapter_id in (1, 2, 3):
        order.use(adapter_id)
    order.forget(1)
    assert order.choose((2, 3)) == 2

    order.use(1)
    assert order.choose((1, 2, 3)) == 2, "it came back as the newest"
