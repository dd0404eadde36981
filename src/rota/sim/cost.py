"""A cost model says how long things take: steps, adapter copies, disk reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rota.core.plan import StepPlan


class CostModel(Protocol):
    """Durations in seconds."""

    def step_s(self, plan: StepPlan) -> float: ...

    @property
    def load_s(self) -> float:
        """Host memory to slot, for one adapter; copies follow each other."""
        ...

    @property
    def fetch_s(self) -> float:
        """Disk to host memory, for one adapter."""
        ...


@dataclass(frozen=True, slots=True)
class ConstantCost:
    """Every step takes the same time."""

    seconds: float
    load_s: float = 0.0
    fetch_s: float = 0.0

    def step_s(self, plan: StepPlan) -> float:
        return self.seconds
