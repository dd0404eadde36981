"""A CPU applies adapters in two products, however many there are: the factors of those in the step, stacked.

    x [tokens, inputs]  ·  [ A of slot 2 ]ᵀ   =   [ x A₂ᵀ | x A₅ᵀ ]     what is not a token's own is struck out, then
                           [ A of slot 5 ]
    [ x A₂ᵀ |   0   ]   ·  [ B of slot 2 ]    =   what each token's adapter adds
                           [ B of slot 5 ]

Computing for every adapter what one of them needs is quicker than asking torch for each by itself: a call costs more
than its work. A stack is kept until an adapter comes that is not in it, or half of its adapters have gone.
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
from rota.engine.model.linear import Projection, projection
from rota.engine.step.lora_batch import LoraBatch

# Of all adapters in a step, at one site. With more of them most of the work would be struck out.
MOST_RANKS = 96

# A slot, and how many adapters were there before the present one.
Tenant = tuple[int, int]
# Adds to y what each token's adapter makes of x.
Add = Callable[[Tensor, Tensor, LoraBatch], None]


@dataclass(frozen=True, slots=True)
class _Stack:
    """The stacked factors of one site of one layer."""

    columns: NDArray[np.int64]  # [columns between the two products] the slot of each
    shrink: Projection
    expand: Projection


class StackedProjector:
    """Products with adapters on a CPU; remembers the newest stacks, and what the newest batch strikes out."""

    def __init__(self, bank: Bank) -> None:
        self._bank = bank
        self._tenants: tuple[Tenant, ...] = ()
        # By the identity of factors, which live as long as the bank; each with the tenants it was made for.
        self._adds: dict[int, tuple[tuple[Tenant, ...], Add]] = {}
        self._batch: LoraBatch | None = None
        self._struck: dict[bytes, Tensor] = {}

    def __call__(self, project: Projection, x: Tensor, factors: SiteFactors, batch: LoraBatch) -> Tensor:
        """A matrix product, and what each token's adapter adds to it."""
        y = project(x)
        if batch is not self._batch:
            self._turn_to(batch)
        tenants, add = self._adds.get(id(factors), (None, _add_nothing))
        if tenants is not self._tenants:
            add = self._add_for(factors)
            self._adds[id(factors)] = (self._tenants, add)
        add(y, x, batch)
        return y

    def _turn_to(self, batch: LoraBatch) -> None:
        """Stacks stay as they are while those in the batch are in them, and at least half of them."""
        self._batch = batch
        self._struck = {}
        tenants = tuple((slot, self._bank.generation(slot)) for slot, _, _ in batch.groups)
        if 2 * len(tenants) < len(self._tenants) or not set(tenants) <= set(self._tenants):
            self._tenants = tenants

    def _add_for(self, factors: SiteFactors) -> Add:
        ranks = factors.ranks.tolist()
        present = [(slot, ranks[slot]) for slot, _ in self._tenants if ranks[slot]]
        if not present:
            return _add_nothing
        if sum(rank for _, rank in present) > MOST_RANKS:
            return partial(_add_by_reference, factors)
        return partial(self._add_stacked, _stack(factors, present))

    def _add_stacked(self, stack: _Stack, y: Tensor, x: Tensor, batch: LoraBatch) -> None:
        # Filled and not multiplied by nought: an adapter may make infinities, and they are no other adapter's.
        y.add_(stack.expand(stack.shrink(x).masked_fill_(self._struck_out(stack, batch), 0.0)))

    def _struck_out(self, stack: _Stack, batch: LoraBatch) -> Tensor:
        """[tokens, columns] where a column is not the token's."""
        layout = stack.columns.tobytes()
        if layout not in self._struck:
            self._struck[layout] = torch.from_numpy(batch.token_slots.numpy()[:, None] != stack.columns)
        return self._struck[layout]


def _stack(factors: SiteFactors, present: Sequence[tuple[int, int]]) -> _Stack:
    """The factors of these slots, each with its rank."""
    widths = factors.shape.widths
    columns = np.repeat([slot for slot, _ in present], [rank * len(widths) for _, rank in present])
    a = [factors.a[slot].unflatten(0, (len(widths), -1))[:, :rank].flatten(0, 1) for slot, rank in present]
    # One product with zeros where parts do not meet is quicker than one for each part.
    b = [torch.block_diag(*factors.b[slot, :rank].split(widths, dim=1)) for slot, rank in present]
    return _Stack(columns, projection(torch.cat(a)), projection(torch.cat(b).T.contiguous()))


def _add_by_reference(factors: SiteFactors, y: Tensor, x: Tensor, batch: LoraBatch) -> None:
    add_lora(y, x, factors, batch)


def _add_nothing(y: Tensor, x: Tensor, batch: LoraBatch) -> None:
    """None of the adapters changes this site."""
