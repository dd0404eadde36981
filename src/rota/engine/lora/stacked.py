"""A CPU applies a step's adapters in two products, whatever their number: their factors are stacked.

    x [tokens, inputs]  ·  [ A of slot 2 ]ᵀ   =   [ x A₂ᵀ | x A₅ᵀ ]     columns of other adapters are masked, then
                           [ A of slot 5 ]
    [ x A₂ᵀ |   0   ]   ·  [ B of slot 2 ]    =   what each token's adapter adds
                           [ B of slot 5 ]

All tokens are multiplied by all adapters, since one large product is faster than a call for each adapter: a call costs
more than its work. A stack is kept until a batch has an adapter that is not in it, or fewer than half of its adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rota.engine.lora.bank import Bank
from rota.engine.lora.layout import SiteFactors
from rota.engine.lora.reference import add_lora
from rota.engine.lora.trims import trim
from rota.engine.model.linear import Projection, projection
from rota.engine.step.lora_batch import LoraBatch

# Ranks of all adapters in a step, at one site. With more ranks most of the work would be masked.
MOST_RANKS = 96

# A slot and its generation: how many adapters were copied into it.
Resident = tuple[int, int]
# Adds to y what each token's adapter makes of x.
Add = Callable[[Tensor, Tensor, LoraBatch], None]


@dataclass(frozen=True, slots=True)
class _Stack:
    """The stacked factors of one site of one layer."""

    columns: NDArray[np.int64]  # [columns between the two products] the slot of each column
    shrink: Projection
    expand: Projection


class StackedProjector:
    """Products with adapters on a CPU; keeps the newest stacks, and the masks of the newest batch."""

    def __init__(self, bank: Bank) -> None:
        self._bank = bank
        self._residents: tuple[Resident, ...] = ()
        # By factors, each with the residents of its stack.
        self._adds: dict[SiteFactors, tuple[tuple[Resident, ...], Add]] = {}
        self._batch: LoraBatch | None = None
        self._masks: dict[bytes, Tensor] = {}

    def __call__(
        self, project: Callable[[Tensor], Tensor], x: Tensor, factors: SiteFactors, batch: LoraBatch
    ) -> Tensor:
        """A matrix product, plus what each token's adapter adds, trimmed where the adapter has trims."""
        y = project(x)
        if batch is not self._batch:
            self._take_batch(batch)
        residents, add = self._adds.get(factors, (None, _add_nothing))
        if residents is not self._residents:
            add = self._add_for(factors)
            self._adds[factors] = (self._residents, add)
        add(y, x, batch)
        if factors.trims is not None:
            trim(y, factors.trims, batch)
        return y

    def add(self, y: Tensor, x: Tensor, factors: SiteFactors, batch: LoraBatch) -> None:
        """Add to y what each token's adapter makes of x."""
        self(lambda _: y, x, factors, batch)

    def _take_batch(self, batch: LoraBatch) -> None:
        """Stacks stay while they have all adapters of the batch, and the batch has at least half of theirs."""
        self._batch = batch
        self._masks = {}
        residents = tuple((slot, self._bank.generation(slot)) for slot, _, _ in batch.groups)
        if 2 * len(residents) < len(self._residents) or not set(residents) <= set(self._residents):
            self._residents = residents

    def _add_for(self, factors: SiteFactors) -> Add:
        ranks = factors.ranks.tolist()
        present = [(slot, ranks[slot]) for slot, _ in self._residents if ranks[slot]]
        if not present:
            return _add_nothing
        if sum(rank for _, rank in present) > MOST_RANKS:
            return partial(_add_by_reference, factors)
        return partial(self._add_stacked, _stack(factors, present))

    def _add_stacked(self, stack: _Stack, y: Tensor, x: Tensor, batch: LoraBatch) -> None:
        # Filled with zeros, not multiplied by zero: another adapter's columns may be infinite.
        y.add_(stack.expand(stack.shrink(x).masked_fill_(self._mask(stack, batch), 0.0)))

    def _mask(self, stack: _Stack, batch: LoraBatch) -> Tensor:
        """[tokens, columns] true where a column is not of the token's adapter."""
        columns = stack.columns.tobytes()
        if columns not in self._masks:
            self._masks[columns] = torch.from_numpy(batch.token_slots.numpy()[:, None] != stack.columns)
        return self._masks[columns]


def _stack(factors: SiteFactors, present: Sequence[tuple[int, int]]) -> _Stack:
    """The factors of these slots, each with its rank."""
    widths = factors.shape.widths
    columns = np.repeat([slot for slot, _ in present], [rank * len(widths) for _, rank in present])
    a, b = zip(*(factors.of_slot(slot, rank) for slot, rank in present), strict=True)
    # One block-diagonal product is faster than one for each part.
    diagonal = torch.cat([torch.block_diag(*one.split(widths, dim=1)) for one in b])
    return _Stack(columns, projection(torch.cat(a)), projection(diagonal.T.contiguous()))


def _add_by_reference(factors: SiteFactors, y: Tensor, x: Tensor, batch: LoraBatch) -> None:
    add_lora(y, x, factors, batch)


def _add_nothing(y: Tensor, x: Tensor, batch: LoraBatch) -> None:
    """None of the adapters changes this site."""
