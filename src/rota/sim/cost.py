"""A cost model says how long things take: steps, adapter copies, disk reads."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Protocol

from rota.core.errors import ConfigError
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


@dataclass(frozen=True, slots=True)
class LinearCost:
    """A step costs a constant, and a little for everything in it."""

    name: str
    step_base_s: float
    sequence_s: float
    prompt_token_s: float
    context_token_s: float
    adapter_s: float
    load_s: float
    fetch_s: float

    def step_s(self, plan: StepPlan) -> float:
        prompt_tokens = sum(chunk.length for chunk in plan.chunks)
        return (
            self.step_base_s
            + self.sequence_s * len(plan.decodes)
            + self.prompt_token_s * prompt_tokens
            + self.context_token_s * plan.context_tokens
            + self.adapter_s * plan.adapters
        )


def read_cost(name: str) -> LinearCost:
    """A cost model that comes with Rota, by name, or one of yours, by path."""
    shipped = files("rota.sim") / "costs"
    path = Path(name) if name.endswith(".toml") else Path(str(shipped / f"{name}.toml"))
    if not path.exists():
        known = sorted(entry.name.removesuffix(".toml") for entry in shipped.iterdir())
        raise ConfigError(f"There is no cost model '{name}'; known are {', '.join(known)}, or give a path to a file.")
    table = tomllib.loads(path.read_text())
    table["step_base_s"] = table.pop("step_s", None)
    missing = [one.name for one in fields(LinearCost) if one.name != "name" and table.get(one.name) is None]
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(missing)}.")
    return LinearCost(name=path.stem, **table)
