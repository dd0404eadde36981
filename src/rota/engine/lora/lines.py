"""Lines are the contiguous stretches of a slot: without a staging buffer an adapter is copied line by line.

    a slot's A at one site of one layer    | part 0: rank rows, zeros | part 1: rank rows, zeros |
                                           └── a line ──┘             └── a line ──┘

A line is what one copy from host memory can fill without a buffer on the device. An adapter of full rank has one line
for all parts of a site. Llama-8B's adapters have 256 lines then, else 352.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rota.engine.model.sites import SiteShape


def line_count(shapes: Sequence[SiteShape], layers: int) -> int:
    """The most lines of a slot."""
    return layers * sum(len(shape.parts) + 1 for shape in shapes)


def lines_of(a: Tensor, b: Tensor, rank: int) -> list[Tensor]:
    """The lines of a site of this rank in a slot, in the order of an adapter's run: A of all layers, then B.

    a: [layers, parts * max_rank, inputs]; b: [layers, max_rank, outputs].
    """
    layers, max_rank = b.shape[:2]
    b_lines = b[:, :rank].view(layers, -1).unbind()
    if rank == max_rank:
        return [*a.view(layers, -1).unbind(), *b_lines]
    parts = a.unflatten(1, (-1, max_rank))[:, :, :rank]
    a_lines = parts.view(*parts.shape[:2], -1)
    return [*(line for layer in a_lines.unbind() for line in layer.unbind()), *b_lines]


def copy_lines(lines: Sequence[Tensor], pieces: Sequence[Tensor]) -> None:
    """Copy a run that lies in pieces to its lines, without waiting if the pieces are pinned.

    One call gives all copies: Python's lock is free meanwhile, and the thread that launches steps is not held up.
    """
    cut = _cut([line.numel() for line in lines], [piece.numel() for piece in pieces])
    targets = _split(lines, cut.lines)
    if targets:
        torch._foreach_copy_(targets, _split(pieces, cut.pieces), non_blocking=True)


@dataclass(frozen=True, slots=True)
class _Cut:
    """The lengths of the parts of each line and of each piece."""

    lines: list[list[int]]
    pieces: list[list[int]]


def _cut(lines: Sequence[int], pieces: Sequence[int]) -> _Cut:
    """Cut lines and pieces of these lengths where either of them ends."""
    cut = _Cut([[] for _ in lines], [[] for _ in pieces])
    piece, room = 0, pieces[0]
    for parts, length in zip(cut.lines, lines, strict=True):
        while length:
            if not room:
                piece += 1
                room = pieces[piece]
            part = min(length, room)
            parts.append(part)
            cut.pieces[piece].append(part)
            length -= part
            room -= part
    assert sum(lines) == sum(pieces), "an adapter has as many numbers as its lines"
    return cut


def _split(tensors: Sequence[Tensor], lengths: Sequence[list[int]]) -> list[Tensor]:
    parts: list[Tensor] = []
    for tensor, each in zip(tensors, lengths, strict=True):
        if len(each) > 1:
            parts += tensor.split(each)
        elif each:
            parts.append(tensor)
    return parts
