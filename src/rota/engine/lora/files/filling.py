"""Filling brings the factors of a folder to their places in an adapter's run, with few calls for many factors.

    file   | A of q | B of q | A of k | …        one call reads what lies side by side, each factor to its own place
    run    | A of q | A of k | …   | Bᵀ of q | …    A lies there as it is stored; B is turned, and scaled

A call that reads or turns holds no lock of the interpreter, so steps are launched meanwhile. What lies between two
calls does, and an adapter has hundreds of factors: so one call takes a part of a site in several layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from rota.engine.lora.files.folder import AdapterFolder, Factors
from rota.engine.lora.files.tensor_file import Read, Stored, read_all
from rota.engine.lora.host import StackedSite
from rota.engine.lora.side_by_side import cut_evenly, side_by_side
from rota.engine.model.sites import SiteShape, module_name
from rota.engine.parallel.shard import Cut

# (part, letter): which stretch of a factor is read.
FactorCut = Callable[[str, Literal["a", "b"]], Cut | None]
BITS = {2: torch.int16, 4: torch.int32}


def fill(
    sites: Sequence[StackedSite],
    shapes: Sequence[SiteShape],
    folder: AdapterFolder,
    cut_of: FactorCut,
    threads: int = 1,
) -> None:
    """Write every number of the sites: factors, and zeros where there are none. Blocks on the disk."""
    jobs = [
        partial(_fill_layers, sites, shapes, folder, cut_of, layers) for layers in cut_evenly(len(sites[0].a), threads)
    ]
    side_by_side(jobs)


def _fill_layers(
    sites: Sequence[StackedSite],
    shapes: Sequence[SiteShape],
    folder: AdapterFolder,
    cut_of: FactorCut,
    layers: range,
) -> None:
    reads, turns = list[Read](), list[_Turn]()
    for site, shape in zip(sites, shapes, strict=True):
        columns = torch.split(site.b[layers.start : layers.stop], list(shape.widths), dim=2)
        for number, (part, _) in enumerate(shape.parts):
            place = _Place(part, layers, site.a[layers.start : layers.stop, number], columns[number])
            if turn := place.expect(folder, cut_of, reads):
                turns.append(turn)
            else:
                place.fill_slowly(folder, cut_of)
    read_all(reads)
    for turn in turns:
        turn.make()


@dataclass(frozen=True, slots=True)
class _Turn:
    """B as it is stored, and where it belongs."""

    stored: Tensor  # [layers, outputs, rank]
    place: Tensor  # [layers, rank, outputs]
    scales: list[float]  # by layer

    def make(self) -> None:
        turned = self.stored.transpose(1, 2)
        if self.scales == [1.0] * len(self.scales):
            bits = BITS[turned.itemsize]  # whole numbers are copied in half the time
            self.place.view(bits).copy_(turned.view(bits))
        elif len(set(self.scales)) == 1:
            torch.mul(turned, self.scales[0], out=self.place)
        else:
            for scale, each, place in zip(self.scales, turned, self.place, strict=True):
                torch.mul(each, scale, out=place)


@dataclass(frozen=True, slots=True)
class _Place:
    """One part of a site in some layers."""

    part: str
    layers: range
    a: Tensor  # [layers, rank, inputs]
    b: Tensor  # [layers, rank, outputs]

    def expect(self, folder: AdapterFolder, cut_of: FactorCut, reads: list[Read]) -> _Turn | None:
        """Add the reads of all layers, which are to be made before the turn; None if they must be read one by one."""
        modules = [module_name(layer, self.part) for layer in self.layers]
        found = [folder.factors[module] for module in modules if module in folder.factors]
        ranks = {folder.config.rank_of(module) for module in modules}
        is_cut = cut_of(self.part, "a") is not None or cut_of(self.part, "b") is not None
        if is_cut or len(ranks) > 1 or len(found) < len(modules) or not all(map(self._is_alike, found)):
            return None
        rank = ranks.pop()
        stored = torch.empty(len(modules), self.b.shape[2], rank, dtype=self.b.dtype)
        self._add_reads(found, rank, stored, reads)
        self._clear_beyond(rank)
        return _Turn(stored, self.b[:, :rank], [folder.config.scale_of(module) for module in modules])

    def _add_reads(self, found: list[Factors], rank: int, stored: Tensor, reads: list[Read]) -> None:
        a_bytes, b_bytes = self.a.view(torch.uint8).numpy(), stored.view(torch.uint8).numpy()
        for number, factors in enumerate(found):
            a, b = _both(factors)
            reads += (Read(a, a_bytes[number, :rank]), Read(b, b_bytes[number]))

    def _is_alike(self, factors: Factors) -> bool:
        a, b = _both(factors)
        return a.dtype == b.dtype == self.a.dtype

    def _clear_beyond(self, rank: int) -> None:
        if rank < self.a.shape[1]:
            self.a[:, rank:].zero_()
            self.b[:, rank:].zero_()

    def fill_slowly(self, folder: AdapterFolder, cut_of: FactorCut) -> None:
        """Layer by layer: parts of factors, other precisions, ranks that differ, layers without factors."""
        for layer, a, b in zip(self.layers, self.a, self.b, strict=True):
            module = module_name(layer, self.part)
            a.zero_()
            b.zero_()
            if module not in folder.factors:
                continue
            stored_a, stored_b = _both(folder.factors[module])
            rank = folder.config.rank_of(module)
            a[:rank] = stored_a.read(cut_of(self.part, "a"))
            # Scaled before rounding: alpha / rank need not be a power of two.
            b[:rank] = stored_b.read(cut_of(self.part, "b")).float().mul_(folder.config.scale_of(module)).T


def _both(factors: Factors) -> tuple[Stored, Stored]:
    assert factors.a is not None
    assert factors.b is not None
    return factors.a, factors.b
