"""A packed adapter lies in host memory as its file has it, and the device puts its factors to their places.

    host     | A of q | B of q | A of k | B of k | …    the file's numbers, in pieces: no factor is moved or turned
    device   A is copied to its lines. B arrives as it is stored, [outputs, rank], and is turned from there

So a read is a few calls, and a launch hardly ever waits for the lock that Python code between such calls holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rota.engine.lora.copies import copy_batch, cut, part_stretches, shares_of
from rota.engine.model.sites import SiteShape, site_shapes
from rota.engine.model.spec import ModelSpec

# [stretches, 3]: the number of a piece, the first byte in it, and how many bytes.
Parts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteParts:
    """Where the factors of one site lie: of all modules that are there, layer after layer and part after part."""

    a: Parts
    b: Parts
    is_there: NDArray[np.bool_]  # [layers, parts]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Packing:
    """Where factors lie in the pieces of a file. Adapters with the same config and header share one."""

    site_ranks: tuple[int, ...]  # in the order of SITES: of every module that is there, or 0
    ranks: Tensor  # [layers, len(SITES)] int32
    scale: float  # of every B
    precision: torch.dtype  # of the file; its numbers are rounded to the bank's while they are read
    sites: tuple[SiteParts | None, ...]  # in the order of SITES; None where there are no factors


def unturned_bytes(spec: ModelSpec, rank: int, dtype: torch.dtype) -> int:
    """What an unpacker takes on the device: all B of the largest adapter."""
    return spec.layers * rank * sum(shape.outputs for shape in site_shapes(spec)) * dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRoute:
    """The copies of a packing, but for the places and pieces that one adapter has. Each field has a number a copy.

    To cut a run takes Python's lock a hundred times, which a busy loop gives back a few milliseconds later each time.
    """

    memory: NDArray[np.int64]  # which of an unpacker's tensors it writes to
    to: NDArray[np.int64]  # the byte there, in the first place
    nth: NDArray[np.int64]  # which of the adapter's places it is for
    step: NDArray[np.int64]  # bytes from one place to the next; 0 where there are none
    piece: NDArray[np.int64]  # which of the adapter's pieces it reads
    out_of: NDArray[np.int64]  # the byte there
    sizes: NDArray[np.int64]

    def copies(self, memory: NDArray[np.int64], places: Sequence[int], pieces: NDArray[np.int64]) -> NDArray[np.int64]:
        """[3, copies]: to, out of, bytes; `memory` and `pieces` are addresses."""
        to = memory[self.memory] + self.to + self.step * np.array(places, np.int64)[self.nth]
        return np.stack([to, pieces[self.piece] + self.out_of, self.sizes])


class Unpacker:
    """Copies packed adapters into a bank, [layers, places, …] by site; for one stream, and one adapter at a time."""

    def __init__(self, a: Sequence[Tensor], b: Sequence[Tensor], shapes: Sequence[SiteShape], max_rank: int) -> None:
        self._a, self._b, self._shapes = a, b, shapes
        layers, outputs = len(b[0]), sum(shape.outputs for shape in shapes)
        # Where B arrives, site after site.
        self._unturned = torch.zeros(layers * max_rank * outputs, dtype=b[0].dtype, device=b[0].device)
        self._turn = _turner(b[0].device)
        self._routes: WeakKeyDictionary[Packing, CopyRoute] = WeakKeyDictionary()
        self._compile(max_rank)

    def unpack(self, places: Sequence[int], pieces: Sequence[Tensor], packing: Packing) -> None:
        """Queue the copies on the current stream; the caller keeps the pieces alive until they are made."""
        route = self._routes.get(packing)
        if route is None:
            route = self._routes[packing] = self._route(packing)
        arriving = list(self._arriving(packing))
        for index, stored, site in arriving:
            if not site.is_there.all():
                self._clear(places, index, stored)
        memory, addresses = ([one.data_ptr() for one in side] for side in ((*self._a, self._unturned), pieces))
        copy_batch(route.copies(np.array(memory), places, np.array(addresses)))
        for index, stored, _ in arriving:
            self._place(places, index, stored, packing.scale)

    def _arriving(self, packing: Packing) -> Iterator[tuple[int, Tensor, SiteParts]]:
        """Where B of each site arrives, as it is stored: [layers, outputs, rank]."""
        left = self._unturned
        for index, (site, rank) in enumerate(zip(packing.sites, packing.site_ranks, strict=True)):
            if site is not None:
                outputs = self._shapes[index].outputs
                stored, left = left.tensor_split([len(self._b[index]) * outputs * rank])
                yield index, stored.view(-1, outputs, rank), site

    def _route(self, packing: Packing) -> CopyRoute:
        # Columns: memory, the byte there, the nth place, bytes from place to place, bytes.
        targets = [
            half[site.is_there].reshape(-1, 5)
            for index, stored, site in self._arriving(packing)
            for half in (self._of_a(index, stored.shape[2]), self._of_b(index, stored))
        ]
        table = np.concatenate(targets)
        parts = np.concatenate([half for site in packing.sites if site is not None for half in (site.a, site.b)])
        to, out_of, sizes = cut(table[:, 4], parts[:, 2])
        memory, at, nth, step, _ = table[to.row].T
        piece, begin, _ = parts[out_of.row].T
        return CopyRoute(
            memory=memory, to=at + to.first, nth=nth, step=step, piece=piece, out_of=begin + out_of.first, sizes=sizes
        )

    def _of_a(self, index: int, rank: int) -> NDArray[np.int64]:
        """Where A goes: [layers, parts, places, 5]."""
        a, place_rank, parts = self._a[index], self._b[index].shape[2], len(self._shapes[index].widths)
        shares = shares_of(range(a.shape[1]), rank, place_rank)
        lines = part_stretches(a, parts, [(0, count) for _, count in shares])
        nth = np.broadcast_to(np.arange(len(shares)), lines.shape[:3])
        memory, step = np.full_like(nth, index), np.full_like(nth, a.stride(1) * a.itemsize)
        return np.stack([memory, lines[..., 0] - a.data_ptr(), nth, step, lines[..., 1]], axis=-1)

    def _of_b(self, index: int, stored: Tensor) -> NDArray[np.int64]:
        """Where B arrives: [layers, parts, 5]."""
        widths = np.array(self._shapes[index].widths)
        row, layer = (stride * stored.itemsize for stride in (stored.stride(1), stored.stride(0)))
        begin = stored.data_ptr() - self._unturned.data_ptr()
        first = begin + np.arange(len(stored))[:, None] * layer + (widths.cumsum() - widths) * row
        none, memory = np.zeros_like(first), np.full_like(first, len(self._a))
        return np.stack([memory, first, none, none, np.broadcast_to(widths * row, first.shape)], axis=-1)

    def _clear(self, places: Sequence[int], index: int, stored: Tensor) -> None:
        """What is copied leaves gaps here."""
        stored.zero_()
        for place in places:
            self._a[index][:, place].zero_()

    def _compile(self, max_rank: int) -> None:
        """Compile kernels before steps run beside them: zeros are turned, to where there are zeros."""
        layers, shape = len(self._b[0]), self._shapes[0]
        for rank in (max_rank >> halved for halved in range(max_rank.bit_length())):
            self._place([0], 0, self._unturned[: layers * shape.outputs * rank].view(layers, shape.outputs, rank), 1.0)

    def _place(self, places: Sequence[int], index: int, stored: Tensor, scale: float) -> None:
        first, b = 0, self._b[index]
        for place, count in shares_of(places, stored.shape[2], b.shape[2]):
            self._turn(stored, first, b[:, place, :count], scale)
            first += count


def _turner(device: torch.device) -> Callable[[Tensor, int, Tensor, float], None]:
    if device.type == "cpu":
        return turn
    from rota.engine.lora import triton_ops

    return triton_ops.turn


def turn(stored: Tensor, first: int, target: Tensor, scale: float) -> None:
    """stored: [layers, outputs, rank]; target: [layers, some of the ranks, outputs], those from `first` on."""
    torch.mul(stored[:, :, first : first + target.shape[1]].transpose(1, 2), scale, out=target)
