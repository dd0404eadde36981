"""Stacks of factors are made when adapters come, kept while they serve, and never outlive an adapter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from rota.engine.lora import reference
from rota.engine.lora.batch import make_batch
from rota.engine.lora.layout import SiteFactors
from rota.engine.lora.reference import StackedProjector, project_with_lora
from rota.engine.model.linear import Linear
from rota.engine.model.sites import SiteShape
from rota.engine.step.device_step import LoraBatch

SITE = SiteShape("qkv", 32, (("q_proj", 16), ("k_proj", 8), ("v_proj", 8)))
SLOTS, RANK = 6, 8
BASE = SLOTS


class Bank:
    """Slots whose adapters change when told to."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.generations = [1] * SLOTS
        ranks = torch.tensor([8, 4, 8, 8, 2, 8], dtype=torch.int32)
        self.factors = SiteFactors(
            SITE, torch.randn(SLOTS, 3 * RANK, SITE.inputs), torch.randn(SLOTS, RANK, SITE.outputs), ranks
        )

    def generation(self, slot: int) -> int:
        return self.generations[slot]

    def replace(self, slot: int) -> None:
        self.factors.a[slot].normal_()
        self.factors.b[slot].normal_()
        self.generations[slot] += 1


class Stage:
    """A bank, its projector, and how many stacks were made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bank = Bank()
        self.project = StackedProjector(self.bank)
        self.weight = Linear(torch.randn(SITE.outputs, SITE.inputs))
        self.made = 0
        monkeypatch.setattr(reference, "_stack", self._count)
        self._make = _MAKE

    def _count(self, *arguments):
        self.made += 1
        return self._make(*arguments)

    def differs(self, *slots: int) -> float:
        """From what the reference gives to tokens of these slots."""
        x, batch = torch.randn(len(slots), SITE.inputs), batch_of(*slots)
        expected = project_with_lora(self.weight, x, self.bank.factors, batch)
        return float((self.project(self.weight, x, self.bank.factors, batch) - expected).abs().max())


_MAKE = reference._stack


def batch_of(*slots: int) -> LoraBatch:
    return make_batch(np.array(slots, np.int32), SLOTS, torch.device("cpu"))


@pytest.fixture
def stage(monkeypatch) -> Stage:
    return Stage(monkeypatch)


def test_a_stack_serves_every_batch_of_those_who_are_in_it(stage):
    for slots in ((0, 1, 2, BASE), (2, 0), (1, 1, 2), (BASE, 2, 1, 0, 0)):
        assert stage.differs(*slots) < 1e-4
    assert stage.made == 1


def test_an_adapter_that_is_not_in_it_makes_a_new_one(stage):
    assert stage.differs(0, 1) < 1e-4
    assert stage.differs(0, 3) < 1e-4
    assert stage.made == 2


def test_a_slot_that_changed_hands_makes_a_new_one(stage):
    assert stage.differs(0, 1) < 1e-4
    stage.bank.replace(1)
    assert stage.differs(0) < 1e-4
    assert stage.made == 1
    assert stage.differs(0, 1) < 1e-4
    assert stage.made == 2


def test_a_stack_of_which_less_than_half_is_left_is_made_anew(stage):
    assert stage.differs(0, 1, 2, 3, 4) < 1e-4
    assert stage.differs(0, 1, 2) < 1e-4
    assert stage.made == 1
    assert stage.differs(0, 1) < 1e-4
    assert stage.made == 2


def test_more_ranks_than_a_stack_is_worth_go_one_by_one(stage, monkeypatch):
    monkeypatch.setattr(reference, "MOST_RANKS", 10)
    assert stage.differs(0, 1, 2) < 1e-4
    assert stage.made == 0
    assert stage.differs(0) < 1e-4
    assert stage.made == 1


def test_infinities_of_one_adapter_stay_its_own(stage):
    stage.bank.factors.a[0].fill_(torch.finfo(torch.float32).max)
    x: Tensor = torch.randn(2, SITE.inputs).abs()
    found = stage.project(stage.weight, x, stage.bank.factors, batch_of(0, 2))
    assert not found[0].isfinite().all()
    alone = stage.project(stage.weight, x[1:], stage.bank.factors, batch_of(2))
    torch.testing.assert_close(found[1:], alone)
