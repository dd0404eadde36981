from __future__ import annotations

import pytest

from rota.core.policy_config import PolicyConfig
from rota.policy.slot_policies import SLOT_POLICIES
from rota.policy.slot_policy import SlotPolicy
from rota.scheduler.turns import MOST_CLAIMANTS
from tests.scheduler.stage import Stage, loads


class Reversible(SlotPolicy):
    """Adapters are due by their number; from a moment on, the highest number is due first."""

    def __init__(self, turns_at: float = 1.0) -> None:
        self._turns_at = turns_at
        self._is_reversed = False
        self.seen: list[int] = []

    def observe(self, slots, now):
        self._is_reversed = now >= self._turns_at
        self.seen = [view.adapter_id for view in slots.claimants()]

    @property
    def due_edition(self):
        return int(self._is_reversed)

    def due_at(self, view):
        return -view.adapter_id if self._is_reversed else view.adapter_id


@pytest.fixture
def policy(monkeypatch) -> Reversible:
    one = Reversible()
    monkeypatch.setitem(SLOT_POLICIES, "reversible", lambda _config, _capacity: one)
    return one


def crowded(adapters: int) -> Stage:
    """One slot, whose resident is busy, and a request for every other adapter."""
    stage = Stage(adapters=adapters, slots=1, policy=PolicyConfig(lora_policy="reversible"))
    stage.seat(1)
    for number in range(2, adapters + 1):
        stage.ask(f"r{number}", number)
    return stage


@pytest.mark.usefixtures("policy")
@pytest.mark.parametrize(("at", "first"), [(0.9, 2), (1.0, 4)], ids=["before", "after"])
def test_the_line_is_sorted_anew_when_a_policy_says_that_adapters_are_due_at_other_times(at, first):
    stage = crowded(adapters=4)
    stage.step(at=at)
    assert next(iter(stage.scheduler._state.absent)).adapter_id == first

    stage.leave("runs1")
    assert loads(stage.step()) == [first]


def test_a_policy_that_looks_at_every_claimant_sees_only_the_first_ones(policy):
    stage = crowded(adapters=2 * MOST_CLAIMANTS)
    stage.step()

    assert policy.seen == [*range(2, 2 + MOST_CLAIMANTS)]
