"""A packed adapter lies in host memory as its file has it, and the device puts its factors to their places.

    host     | A of q | B of q | A of k | B of k | …    the file's numbers, in pieces: no factor is moved or turned
    device   A is copied to its lines. B arrives as it is stored, [outputs, rank], and is turned from there

So a read is a few calls, and a launch hardly ever waits for the lock that Python code between such calls holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rota.engine.lora.copies import StretchTable, copy_stretches, part_stretches, shares_of
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


@dataclass(frozen=True, slots=True, kw_only=True)
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


class Unpacker:
    """Copies packed adapters into a bank, [layers, places, …] by site; for one stream, and one adapter at a time."""

    def __init__(self, a: Sequence[Tensor], b: Sequence[Tensor], shapes: Sequence[SiteShape], max_rank: int) -> None:
        self._a, self._b, self._shapes = a, b, shapes
        layers, outputs = len(b[0]), sum(shape.outputs for shape in shapes)
        # Where B arrives, site after site.
        self._unturned = torch.zeros(layers * max_rank * outputs, dtype=b[0].dtype, device=b[0].device)
        self._turn = _turner(b[0].device)
        self._compile(max_rank)

    def unpack(self, places: Sequence[int], pieces: Sequence[Tensor], packing: Packing) -> None:
        """Queue the copies on the current stream; the caller keeps the pieces alive until they are made."""
        addresses = np.array([piece.data_ptr() for piece in pieces])
        targets, sources, arrived = list[StretchTable](), list[StretchTable](), list[tuple[int, Tensor]]()
        left = self._unturned
        for index, (site, rank) in enumerate(zip(packing.sites, packing.site_ranks, strict=True)):
            if site is None:
                continue
            outputs = self._shapes[index].outputs
            stored, left = left.tensor_split([len(self._b[index]) * outputs * rank])
            stored = stored.view(-1, outputs, rank)
            if not site.is_there.all():
                self._clear(places, index, stored)
            targets += self._targets(places, index, stored, site.is_there)
            sources += [_located(site.a, addresses), _located(site.b, addresses)]
            arrived.append((index, stored))
        copy_stretches(np.concatenate(targets), np.concatenate(sources))
        for index, stored in arrived:
            self._place(places, index, stored, packing.scale)

    def _clear(self, places: Sequence[int], index: int, stored: Tensor) -> None:
        """What is copied leaves gaps here."""
        stored.zero_()
        for place in places:
            self._a[index][:, place].zero_()

    def _targets(
        self, places: Sequence[int], index: int, stored: Tensor, is_there: NDArray[np.bool_]
    ) -> list[StretchTable]:
        """Where A and B of the modules that are there go, in the order of their parts."""
        a, place_rank, widths = self._a[index], self._b[index].shape[2], np.array(self._shapes[index].widths)
        of_a = part_stretches(a, len(widths), shares_of(places, stored.shape[2], place_rank))
        row, layer = (stride * stored.itemsize for stride in (stored.stride(1), stored.stride(0)))
        first = np.arange(len(stored))[:, None] * layer + (widths.cumsum() - widths) * row
        of_b = np.stack([stored.data_ptr() + first, np.broadcast_to(widths * row, first.shape)], axis=-1)
        return [of_a[is_there].reshape(-1, 2), of_b[is_there]]

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


def _located(parts: Parts, addresses: NDArray[np.int64]) -> StretchTable:
    return np.stack([addresses[parts[:, 0]] + parts[:, 1], parts[:, 2]], axis=1)
