"""The shape of a step in numbers: what a cost model charges for, column by column."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from rota.sim.cost import LinearCost
from rota.sim.graphs import Graphs

# The numbers of `LinearCost` that steps show, in the order of the columns of `_linear`.
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


@dataclass(frozen=True, slots=True)
class StepShape:
    """Columns with names: a step's time is the sum of its features, each times the cost of that name."""

    names: Sequence[str]
    features: Callable[[MeasuredStep], Sequence[float]]
    with_costs: Callable[[LinearCost, Mapping[str, float]], LinearCost]


def linear_shape() -> StepShape:
    """A step costs a little for each thing in it."""

    def with_costs(like: LinearCost, fitted: Mapping[str, Any]) -> LinearCost:
        return replace(like, **fitted)

    return StepShape(FITTED, _linear, with_costs)


def graph_shape(graphs: Graphs) -> StepShape:
    """A step is padded, and its tokens cost what a curve says."""
    kept = [column for column, name in enumerate(FITTED) if name not in ON_THE_CURVE]
    segments = [f"up to {knot}" for knot in graphs.knots[1:]]

    def features(step: MeasuredStep) -> list[float]:
        tokens, has_graph = graphs.padded(step.decodes, step.prompt_tokens)
        linear, has_adapters = _linear(step), step.adapters > 0
        of_graphs = (float(tokens * has_adapters), float(not has_graph), float(not has_graph and has_adapters))
        return [*(linear[column] for column in kept), *of_graphs, *graphs.stairs(tokens)]

    def with_costs(like: LinearCost, fitted: Mapping[str, float]) -> LinearCost:
        """A segment of the curve that no step has reached rises as it does in `like`."""
        former = [high - low for low, high in zip(graphs.knots_s, graphs.knots_s[1:], strict=False)]
        rises = [fitted.get(name, rise) for name, rise in zip(segments, former, strict=True)]
        own: dict[str, Any] = {name: fitted[name] for name in OF_GRAPHS if name in fitted}
        found = replace(graphs, knots_s=tuple(accumulate(rises, initial=0.0)), **own)
        linear: dict[str, Any] = {name: fitted[name] for name in FITTED if name in fitted}
        return replace(like, graphs=found, **(linear | dict.fromkeys(ON_THE_CURVE, 0.0)))

    return StepShape([*(FITTED[column] for column in kept), *OF_GRAPHS, *segments], features, with_costs)


def _linear(step: MeasuredStep) -> tuple[float, ...]:
    return (
        1.0,
        float(step.prompt_tokens > 0),
        float(step.adapters > 0),
        step.decodes,
        step.prompt_tokens,
        step.context_tokens,
        step.adapters,
    )
