"""Calibration fits a cost model to measured steps, and says how large its error is."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rota.core.errors import ConfigError
from rota.observe.summary import spread
from rota.sim.cost import LinearCost

COUNTS = ("decodes", "prompt_tokens", "context_tokens", "adapters")
# What a step can cost, in the order of the columns of `_features`.
FITTED = ("base_s", "prefill_s", "lora_s", "sequence_s", "prompt_token_s", "context_token_s", "adapter_s")
FEWEST_STEPS = 20
ROUNDS = 20
USUAL = 0.03  # a share of a step's time


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """One step of a live engine: what was in it, and how long it took."""

    decodes: int
    prompt_tokens: int
    context_tokens: int
    adapters: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A cost model and its relative error over the steps it was fitted to."""

    cost: LinearCost
    steps: int
    median_error: float
    p95_error: float

    def __str__(self) -> str:
        return f"{self.steps:,} steps; off by {self.median_error:.1%} (median) and {self.p95_error:.1%} (P95)"


def calibrate(steps: list[MeasuredStep], like: LinearCost, name: str) -> Fit:
    """The costs with the least relative error; what these steps do not show (loads, say) is as in `like`."""
    if like.prefill == "alone":
        raise ConfigError(
            f"{like.name} computes prompts alone, but measured steps mix prompts and decodes; fit another."
        )
    features = np.array([_features(step) for step in steps], dtype=np.float64)
    seconds = np.array([step.seconds for step in steps], dtype=np.float64)
    occurring = [column for column in range(len(FITTED)) if features[:, column].any()]
    features = features[:, occurring]
    weights = _fit(features, seconds)
    fitted = {FITTED[column]: float(weight) for column, weight in zip(occurring, weights, strict=True)}
    errors = spread(np.abs(features @ weights - seconds) / seconds)
    return Fit(
        cost=replace(like, name=name, prefill="mixed", **fitted),
        steps=len(steps),
        median_error=errors["median"],
        p95_error=errors["p95"],
    )


def _fit(features: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Relative and robust: measured steps contain pauses, and parts of other steps, which no model explains."""
    weights = _solve(features, seconds)
    for _ in range(ROUNDS):
        expected = np.maximum(features @ weights, seconds.min())
        off = np.abs(seconds - expected) / expected
        # Above the usual error, a step with twice the error has no more influence.
        pull = np.sqrt(np.minimum(1.0, USUAL / np.maximum(off, USUAL))) / expected
        weights = _solve(features * pull[:, None], seconds * pull)
    return weights


def _features(step: MeasuredStep) -> tuple[float, ...]:
    return (
        1.0,
        float(step.prompt_tokens > 0),
        float(step.adapters > 0),
        step.decodes,
        step.prompt_tokens,
        step.context_tokens,
        step.adapters,
    )


def _solve(features: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares in which no cost is negative.

    The best such answer is an ordinary one over some set of columns; the other columns are zero. There are few columns,
    so all sets are tried. A QR decomposition makes each problem as small as the number of columns.
    """
    scale = features.max(axis=0)
    _, triangle = np.linalg.qr(np.column_stack([features / scale, target]))
    columns, goal = triangle[:, :-1], triangle[:, -1]
    best: NDArray[np.float64] = np.zeros(columns.shape[1])
    least = float(goal @ goal)
    for size in range(1, columns.shape[1] + 1):
        for chosen in combinations(range(columns.shape[1]), size):
            part = columns[:, chosen]
            found = np.linalg.lstsq(part, goal, rcond=None)[0]
            left = float(((part @ found - goal) ** 2).sum())
            if left < least * (1 - 1e-9) and (found >= 0.0).all():
                best, least = np.zeros(columns.shape[1]), left
                best[list(chosen)] = found
    answer: NDArray[np.float64] = best / scale
    return answer


def read_timings(path: Path) -> list[MeasuredStep]:
    """A JSON list of objects with the fields of `MeasuredStep`."""
    try:
        entries = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a JSON file: {error}.") from None
    if not isinstance(entries, list) or len(entries) < FEWEST_STEPS:
        raise ConfigError(f"{path} must hold a list of at least {FEWEST_STEPS} measured steps.")
    return [_step(entry, f"{path}, step {number}") for number, entry in enumerate(entries, 1)]


def _step(entry: Any, where: str) -> MeasuredStep:
    wanted = (*COUNTS, "seconds")
    if not isinstance(entry, dict) or set(entry) != set(wanted):
        raise ConfigError(f"{where}: a step has {', '.join(wanted)} and nothing else, not {entry!r}.")
    for name in COUNTS:
        if not isinstance(entry[name], int) or entry[name] < 0:
            raise ConfigError(f"{where}: {name} must be a whole number of at least 0, not {entry[name]!r}.")
    seconds = entry["seconds"]
    if not isinstance(seconds, int | float) or not 0.0 < seconds < math.inf:
        raise ConfigError(f"{where}: seconds must be a number above 0, not {seconds!r}.")
    return MeasuredStep(**entry)


def write_cost(fit: Fit, path: Path, source: Path) -> None:
    """A file that `--cost` takes."""
    told = (*FITTED, "load_s", "fetch_s")
    lines = [f"# Fitted to {source.name}: {fit}.", *(f"{name} = {getattr(fit.cost, name):.4g}" for name in told)]
    path.write_text("\n".join(lines) + "\n", "utf-8")
