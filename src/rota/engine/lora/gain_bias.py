"""A gain and a bias for each output of a site: what DoRA and biases are, once an adapter is loaded.

    y = gain · (x Wᵀ + x Aᵀ B) + shift

A slot's gains and biases are one run of numbers, layer after layer, so that one copy fills them:

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
# without copies of its gains and biases.
FEW_TOKENS, FEW_GROUPS = 64, 4


@dataclass(frozen=True, slots=True)
class GainBias:
    """The gains and biases of every slot at one site of one layer."""

    numbers: Tensor  # [slots, 2, outputs] float32: gains and shifts; slots lie far apart
    has_gain_bias: Tensor  # [slots] bool: which slots have an adapter with gains and biases


class SlotGainBias:
    """The gains and biases of all slots on the device."""

    def __init__(self, shapes: Sequence[SiteShape], slots: int, layers: int, device: torch.device) -> None:
        self._shapes = shapes
        self._lines = empty_run(shapes, layers).to(device).repeat(slots, 1, 1)  # [slots, layers, numbers of a layer]
        self._has_gain_bias = torch.zeros(slots, dtype=torch.bool, device=device)
        # Known on the host too: a slot without gains and biases need not be cleared again.
        self._with_gain_bias: set[int] = set()
        self.size_bytes = self._lines.nbytes

    def at(self, layer: int, site: int) -> GainBias:
        """What the operations read at one site of one layer; the tensors never change their address."""
        return GainBias(site_gain_bias(self._lines[:, layer], self._shapes)[site], self._has_gain_bias)

    def copy_in(self, slot: int, gain_bias: Tensor | None) -> None:
        """Replace the slot's gains and biases, or leave it without; queued as the bank's copies are."""
        if gain_bias is not None:
            self._lines[slot].copy_(gain_bias, non_blocking=True)
            self._with_gain_bias.add(slot)
        elif slot in self._with_gain_bias:
            clear(self._lines[slot], self._shapes)
            self._with_gain_bias.remove(slot)
        self._has_gain_bias[slot] = gain_bias is not None


def line_length(shapes: Sequence[SiteShape]) -> int:
    """The numbers of one layer."""
    return sum(2 * shape.outputs for shape in shapes)


def gain_bias_bytes(shapes: Sequence[SiteShape], layers: int) -> int:
    """The bytes of one slot's gains and biases."""
    return layers * line_length(shapes) * torch.float32.itemsize


def site_gain_bias(lines: Tensor, shapes: Sequence[SiteShape]) -> list[Tensor]:
    """Each site's [..., 2, outputs] in lines [..., numbers of a layer], as views."""
    parts = torch.split(lines, [2 * shape.outputs for shape in shapes], dim=-1)
    return [part.unflatten(-1, (2, shape.outputs)) for part, shape in zip(parts, shapes, strict=True)]


def empty_run(shapes: Sequence[SiteShape], layers: int) -> Tensor:
    """The run of an adapter that scales and shifts nothing: [layers, numbers of a layer] float32."""
    run = torch.zeros(layers, line_length(shapes))
    clear(run, shapes)
    return run


def clear(lines: Tensor, shapes: Sequence[SiteShape]) -> None:
    """Gains of one, shifts of nought."""
    lines.zero_()
    for site in site_gain_bias(lines, shapes):
        site[..., 0, :] = 1.0


def apply_gain_bias(y: Tensor, gain_bias: GainBias, batch: LoraBatch) -> None:
    """Scale and shift the rows of y [tokens, outputs] whose adapter has gains and biases; the others do not change."""
    with_gain_bias = tuple(gain_bias.has_gain_bias.tolist())
    groups, tokens = _tokens(batch, with_gain_bias)
    if tokens is not None and len(groups) > FEW_GROUPS and len(tokens) <= FEW_TOKENS:
        gain, shift = gain_bias.numbers[batch.token_slots[tokens]].unbind(dim=1)
        y[tokens] = torch.addcmul(shift, y[tokens], gain).to(y.dtype)
        return
    for slot, rows in groups:
        gain, shift = gain_bias.numbers[slot]
        if isinstance(rows, slice):
            torch.addcmul(shift, y[rows], gain, out=y[rows])
        else:
            y[rows] = torch.addcmul(shift, y[rows], gain).to(y.dtype)


@functools.lru_cache(maxsize=4)
def _tokens(
    batch: LoraBatch, with_gain_bias: tuple[bool, ...]
) -> tuple[list[tuple[int, slice | Tensor]], Tensor | None]:
    """The slots that have them, with their tokens, and all of these tokens; all sites of a step share them."""
    groups = [(slot, batch.order[first:end]) for slot, first, end in batch.groups if with_gain_bias[slot]]
    tokens = torch.cat([rows for _, rows in groups]) if groups else None
    return [(slot, run_or_indices(rows)) for slot, rows in groups], tokens


def run_or_indices(tokens: Tensor) -> slice | Tensor:
    """A slice if the tokens are contiguous, as a prompt's are: a slice copies nothing."""
    first, last = int(tokens[0]), int(tokens[-1])
    return slice(first, last + 1) if last - first + 1 == len(tokens) else tokens
