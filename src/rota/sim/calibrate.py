"""Calibration fits a cost model to measured steps, and says how large its error is."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rota.core.errors import ConfigError
from rota.observe.summary import spread
from rota.sim.cost import Graphs, LinearCost

# ── step shapes ─────────────────────────────────────────────────────────────────────────────────────────────────────
# The shape of a step in numbers: what a cost model charges for, column by column.

# The numbers of `LinearCost` that steps show, in the order of the columns.
FITTED = ("base_s", "prefill_s", "lora_s", "sequence_s", "prompt_token_s", "context_token_s", "adapter_s")
# With graphs, tokens cost what the curve says, and nothing besides.
ON_THE_CURVE = ("sequence_s", "prompt_token_s")
OF_GRAPHS = ("lora_token_s", "eager_s", "eager_lora_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """One step of a live engine: what was in it, and how long it took."""

    decodes: int
    prompt_tokens: int
    context_tokens: int
    adapters: int
    seconds: float


def names_of(graphs: Graphs | None) -> list[str]:
    """The columns. Without graphs a step costs a little for each thing in it; with graphs it is padded, and its tokens
    cost what a curve says."""
    if graphs is None:
        return [*FITTED]
    return [*(name for name in FITTED if name not in ON_THE_CURVE), *OF_GRAPHS, *_segments(graphs)]


def features_of(step: MeasuredStep, graphs: Graphs | None) -> list[float]:
    """A step's time is the sum of these, each times the cost of its column."""
    has_prompt, has_adapters = step.prompt_tokens > 0, step.adapters > 0
    counts = (step.decodes, step.prompt_tokens, step.context_tokens, step.adapters)
    linear = dict(zip(FITTED, (1.0, float(has_prompt), float(has_adapters), *counts), strict=True))
    if graphs is None:
        return [*linear.values()]
    tokens, has_graph = graphs.padded(step.decodes, step.prompt_tokens)
    of_graphs = (float(tokens * has_adapters), float(not has_graph), float(not has_graph and has_adapters))
    kept = (feature for name, feature in linear.items() if name not in ON_THE_CURVE)
    return [*kept, *of_graphs, *graphs.stairs(tokens)]


def with_costs(like: LinearCost, fitted: Mapping[str, float]) -> LinearCost:
    """A segment of the curve that no step has reached rises as it does in `like`."""
    linear: dict[str, Any] = {name: fitted[name] for name in FITTED if name in fitted}
    if (graphs := like.graphs) is None:
        return replace(like, **linear)
    former = [high - low for low, high in zip(graphs.knots_s, graphs.knots_s[1:], strict=False)]
    rises = [fitted.get(name, rise) for name, rise in zip(_segments(graphs), former, strict=True)]
    own: dict[str, Any] = {name: fitted[name] for name in OF_GRAPHS if name in fitted}
    found = replace(graphs, knots_s=tuple(accumulate(rises, initial=0.0)), **own)
    return replace(like, graphs=found, **(linear | dict.fromkeys(ON_THE_CURVE, 0.0)))


def _segments(graphs: Graphs) -> list[str]:
    return [f"up to {knot}" for knot in graphs.knots[1:]]


COUNTS = ("decodes", "prompt_tokens", "context_tokens", "adapters")
FEWEST_STEPS = 20
ROUNDS = 20
USUAL = 0.03  # a share of a step's time


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A cost model and its relative error over the steps it was fitted to."""

    cost: LinearCost
    steps: int
    median_error: float
    p95_error: float

    def __str__(self) -> str:
        return f"{self.steps:,} steps; off by {self.median_error:.1%} (median) and {self.p95_error:.1%} (P95)"


def calibrate(steps: Sequence[MeasuredStep], like: LinearCost, name: str) -> Fit:
    """The costs with the least relative error; what these steps do not show (loads, say) is as in `like`.

    If `like` has graphs, the steps are padded to its sizes, and the curve through its knots is fitted too.
    """
    if like.prefill == "alone":
        raise ConfigError(
            f"{like.name} computes prompts alone, but measured steps mix prompts and decodes; fit another."
        )
    names = names_of(like.graphs)
    features = np.array([features_of(step, like.graphs) for step in steps], dtype=np.float64)
    seconds = np.array([step.seconds for step in steps], dtype=np.float64)
    occurring = [column for column in range(len(names)) if features[:, column].any()]
    weights = _fit(features[:, occurring], seconds)
    fitted = {names[column]: float(weight) for column, weight in zip(occurring, weights, strict=True)}
    cost = with_costs(replace(like, name=name, prefill="mixed"), fitted)
    return Fit(cost=cost, steps=len(steps), **errors(cost, steps))


def errors(cost: LinearCost, steps: Sequence[MeasuredStep]) -> dict[str, float]:
    """How far off a model is, as a share of each step's time."""
    measured = np.array([step.seconds for step in steps])
    expected = np.array(
        [cost.seconds(step.decodes, step.prompt_tokens, step.context_tokens, step.adapters) for step in steps]
    )
    found = spread(np.abs(expected - measured) / measured)
    return {"median_error": found["median"], "p95_error": found["p95"]}


def _fit(features: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Relative and robust: measured steps contain pauses, and parts of other steps, which no model explains."""
    weights = _solve(features / seconds[:, None], np.ones(len(seconds)))
    for _ in range(ROUNDS):
        expected = np.maximum(features @ weights, seconds.min())
        off = np.abs(seconds - expected) / expected
        # Above the usual error, a step with twice the error has no more influence.
        pull = np.sqrt(np.minimum(1.0, USUAL / np.maximum(off, USUAL))) / expected
        weights = _solve(features * pull[:, None], seconds * pull)
    return weights


def _solve(features: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares in which no cost is negative, as Lawson and Hanson find it.

    The best answer is an ordinary one over some set of columns, and the other columns are zero. Column by column, the
    one that would help most joins the set. A column that would become negative leaves it. A QR decomposition makes
    each problem as small as the number of columns.
    """
    scale = np.linalg.norm(features, axis=0)
    _, triangle = np.linalg.qr(np.column_stack([features / scale, target]))
    columns, goal = triangle[:, :-1], triangle[:, -1]
    count = columns.shape[1]
    answer, chosen = np.zeros(count), np.zeros(count, dtype=bool)
    for _ in range(10 * count):
        gradient = columns.T @ (goal - columns @ answer)
        gradient[chosen] = 0.0
        best = int(gradient.argmax())
        if gradient[best] <= 1e-10 * np.linalg.norm(goal):
            break
        chosen[best] = True
        while True:
            found = np.zeros(count)
            found[chosen] = np.linalg.lstsq(columns[:, chosen], goal, rcond=None)[0]
            negative = chosen & (found <= 0.0)
            if not negative.any():
                answer = found
                break
            # As far towards the new answer as no column becomes negative; the columns that became zero leave.
            way = float((answer[negative] / np.maximum(answer[negative] - found[negative], 1e-300)).min())
            answer = answer + way * (found - answer)
            chosen &= answer > 1e-15
            answer[~chosen] = 0.0
    solved: NDArray[np.float64] = answer / scale
    return solved


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
    cost = fit.cost
    told = (*FITTED, "load_s", "fetch_s", "prefix_pair_s", "front_s", "mask_s", "mask_row_s")
    lines = [f"# Fitted to {source.name}: {fit}.", *(f"{name} = {getattr(cost, name):.4g}" for name in told)]
    if cost.graphs is not None:
        lines += ["", "[graphs]"]
        for one in fields(cost.graphs):
            value = getattr(cost.graphs, one.name)
            shown = f"[{', '.join(f'{each:.5g}' for each in value)}]" if isinstance(value, tuple) else f"{value:.4g}"
            lines.append(f"{one.name} = {shown}")
    path.write_text("\n".join(lines) + "\n", "utf-8")
