"""A trim is a gain and a shift for each output of a site: what DoRA and biases are, once an adapter is loaded.

    y = gain · (x Wᵀ + x Aᵀ B) + shift

A slot's trims are one run of numbers, layer after layer, so that one copy fills them:

    | qkv: gains, shifts | o: gains, shifts | gate_up: gains, shifts | down: gains, shifts |   and so for each layer

A slot whose adapter has none keeps gains of one and shifts of nought. On a CPU its tokens are left alone, and so are
the base model's everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rota.engine.model.sites import SiteShape
from rota.engine.step.device_step import LoraBatch

# Up to so many tokens of more than so many adapters take one operation for all of them. Else each adapter takes one,
# without copies of its trims.
FEW_TOKENS, FEW_GROUPS = 64, 4


@dataclass(frozen=True, slots=True)
class Trims:
    """The trims of every slot at one site of one layer."""

    numbers: Tensor  # [slots, 2, outputs] float32: gains and shifts; slots lie far apart
    is_trimmed: Tensor  # [slots] bool: which slots have an adapter with trims


def empty_trims(slots: int, outputs: int, device: torch.device) -> Trims:
    """Of one site, for slots without trims."""
    numbers = torch.zeros(slots, 2, outputs, device=device)
    numbers[:, 0] = 1.0
    return Trims(numbers, torch.zeros(slots, dtype=torch.bool, device=device))


class SlotTrims:
    """The trims of all slots on the device."""

    def __init__(self, shapes: Sequence[SiteShape], slots: int, layers: int, device: torch.device) -> None:
        self._shapes = shapes
        self._lines = empty_run(shapes, layers).to(device).repeat(slots, 1, 1)  # [slots, layers, numbers of a layer]
        self._is_trimmed = torch.zeros(slots, dtype=torch.bool, device=device)
        # Known on the host too: a slot without trims need not be cleared again.
        self._trimmed: set[int] = set()
        self.size_bytes = self._lines.nbytes

    def at(self, layer: int, site: int) -> Trims:
        """What the operations read at one site of one layer; the tensors never change their address."""
        return Trims(site_trims(self._lines[:, layer], self._shapes)[site], self._is_trimmed)

    def copy_in(self, slot: int, trims: Tensor | None) -> None:
        """Replace the slot's trims, or leave it without; queued as the bank's copies are."""
        if trims is not None:
            self._lines[slot].copy_(trims, non_blocking=True)
            self._trimmed.add(slot)
        elif slot in self._trimmed:
            clear(self._lines[slot], self._shapes)
            self._trimmed.remove(slot)
        self._is_trimmed[slot] = trims is not None


def line_length(shapes: Sequence[SiteShape]) -> int:
    """The numbers of one layer."""
    return sum(2 * shape.outputs for shape in shapes)


def trim_bytes(shapes: Sequence[SiteShape], layers: int) -> int:
    """The bytes of one slot's trims."""
    return layers * line_length(shapes) * torch.float32.itemsize


def site_trims(lines: Tensor, shapes: Sequence[SiteShape]) -> list[Tensor]:
    """Each site's [..., 2, outputs] in lines [..., numbers of a layer], as views."""
    parts = torch.split(lines, [2 * shape.outputs for shape in shapes], dim=-1)
    return [part.unflatten(-1, (2, shape.outputs)) for part, shape in zip(parts, shapes, strict=True)]


def empty_run(shapes: Sequence[SiteShape], layers: int) -> Tensor:
    """The run of an adapter that trims nothing: [layers, numbers of a layer] float32."""
    run = torch.zeros(layers, line_length(shapes))
    clear(run, shapes)
    return run


def clear(lines: Tensor, shapes: Sequence[SiteShape]) -> None:
    """Gains of one, shifts of nought."""
    lines.zero_()
    for site in site_trims(lines, shapes):
        site[..., 0, :] = 1.0


def trim(y: Tensor, trims: Trims, batch: LoraBatch) -> None:
    """Trim the rows of y [tokens, outputs] whose adapter has trims; the others do not change."""
    trimmed = tuple(trims.is_trimmed.tolist())
    groups, tokens = _tokens(batch, trimmed)
    if tokens is not None and len(groups) > FEW_GROUPS and len(tokens) <= FEW_TOKENS:
        gain, shift = trims.numbers[batch.token_slots[tokens]].unbind(dim=1)
        y[tokens] = torch.addcmul(shift, y[tokens], gain).to(y.dtype)
        return
    for slot, rows in groups:
        gain, shift = trims.numbers[slot]
        if isinstance(rows, slice):
            torch.addcmul(shift, y[rows], gain, out=y[rows])
        else:
            y[rows] = torch.addcmul(shift, y[rows], gain).to(y.dtype)


@functools.lru_cache(maxsize=4)
def _tokens(batch: LoraBatch, trimmed: tuple[bool, ...]) -> tuple[list[tuple[int, slice | Tensor]], Tensor | None]:
    """The slots that have trims with their tokens, and all of these tokens; all sites of a step share them."""
    groups = [(slot, batch.order[first:end]) for slot, first, end in batch.groups if trimmed[slot]]
    tokens = torch.cat([rows for _, rows in groups]) if groups else None
    return [(slot, _run_or_indices(rows)) for slot, rows in groups], tokens


def _run_or_indices(tokens: Tensor) -> slice | Tensor:
    """A slice if the tokens are contiguous: they are trimmed where they lie."""
    first, last = int(tokens[0]), int(tokens[-1])
    return slice(first, last + 1) if last - first + 1 == len(tokens) else tokens
