"""Pools make one vector of the hidden states of a prompt's chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from rota.core.plan import StepPlan


def pool(plan: StepPlan, hidden: Tensor) -> Tensor:
    """[pools, hidden size] float32: the last hidden state of each pool's chunk, or the sum of all.

    hidden [tokens, hidden size]: those of decodes first, then of chunks, one after the other.
    """
    states = dict(zip((chunk.row for chunk in plan.chunks), _of_chunks(plan, hidden), strict=True))
    found = (states[one.row] if one.pooling == "mean" else states[one.row][-1:] for one in plan.pools)
    return torch.stack([some.float().sum(0) for some in found])


def _of_chunks(plan: StepPlan, hidden: Tensor) -> tuple[Tensor, ...]:
    return hidden[len(plan.decodes) :].split([chunk.length for chunk in plan.chunks])
