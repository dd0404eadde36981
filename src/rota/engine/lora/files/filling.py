"""Filling brings the factors of a folder to their places in an adapter's run, with few calls for many factors.

    file   | A of q | B of q | A of k | …        one call reads what lies side by side, each factor to its own place
    run    | A of q | A of k | …   | Bᵀ of q | …    A lies there as it is stored; B is turned, and scaled

A call that reads or turns holds no lock of the interpreter, so steps are launched meanwhile. What lies between two
calls does, and an adapter has hundreds of factors: so one call takes a part of a site in several layers, and where all
of it goes is found out once for all adapters that are alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from rota.engine.lora.files.folder import AdapterFolder, Factors
from rota.engine.lora.files.tensor_file import Read, StoredTensor, TensorFile, TensorRun, runs_of
from rota.engine.lora.host import StackedSite, cut_evenly, side_by_side
from rota.engine.model.sites import SiteShape, module_name
from rota.engine.parallel.shard import Cut
from rota.engine.weights.finite import is_finite

# (part, letter): which stretch of a factor is read.
FactorCut = Callable[[str, Literal["a", "b"]], Cut | None]
BITS = {2: torch.int16, 4: torch.int32}


class Filling:
    """What is to be read and turned. It is made once, and fills the same memory from any folder with such headers."""

    def __init__(
        self,
        sites: Sequence[StackedSite],
        shapes: Sequence[SiteShape],
        folder: AdapterFolder,
        cut_of: FactorCut,
        memory: Tensor,
        threads: int = 1,
    ) -> None:
        """B is read into `memory`, which has as many numbers as all B of the sites, and turned from there."""
        self._cut_of, scratch = cut_of, _Scratch(memory)
        ranges = cut_evenly(len(sites[0].a), threads)
        self._jobs = [_job_of(sites, shapes, folder, cut_of, layers, scratch) for layers in ranges]
        # Does it need nothing but the files?
        self.is_quick = not any(job.slow for job in self._jobs)

    def run(self, files: Sequence[TensorFile], folder: AdapterFolder | None) -> bool:
        """Write every number of the sites: factors, and zeros where there are none. False: some are not finite.

        Blocks on the disk.
        """
        are_finite = list[bool]()
        side_by_side([partial(job.run, files, folder, self._cut_of, are_finite) for job in self._jobs])
        return all(are_finite)


class _Scratch:
    """Memory that is given away from its beginning to its end."""

    def __init__(self, memory: Tensor) -> None:
        self._left = memory

    def take(self, *shape: int) -> Tensor:
        taken, self._left = self._left.tensor_split([math.prod(shape)])
        return taken.view(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class _FillJob:
    """What one thread does: some layers."""

    runs: list[TensorRun]
    turns: list[_TurnedFactor]
    slow: list[_SitePart]
    written: list[Tensor]  # what is filled by all that

    def run(
        self,
        files: Sequence[TensorFile],
        folder: AdapterFolder | None,
        cut_of: FactorCut,
        are_finite: list[bool],
    ) -> None:
        for place in self.slow:
            assert folder is not None, "a filling that is not quick was given no folder"
            place.fill_slowly(folder, cut_of)
        for run in self.runs:
            files[run.file].read_run(run.reads)
        for turn in self.turns:
            turn.make()
        are_finite.append(all(map(is_finite, self.written)))  # here, where they lie in the processor's cache


def _job_of(
    sites: Sequence[StackedSite],
    shapes: Sequence[SiteShape],
    folder: AdapterFolder,
    cut_of: FactorCut,
    layers: range,
    scratch: _Scratch,
) -> _FillJob:
    reads, turns, slow = list[Read](), list[_TurnedFactor](), list[_SitePart]()
    for site, shape in zip(sites, shapes, strict=True):
        columns = torch.split(site.b[layers.start : layers.stop], list(shape.widths), dim=2)
        for number, (part, _) in enumerate(shape.parts):
            place = _SitePart(part, layers, site.a[layers.start : layers.stop, number], columns[number])
            if turn := place.expect(folder, cut_of, reads, scratch):
                turns.append(turn)
            else:
                slow.append(place)
    factors = [factor[layers.start : layers.stop] for site in sites for factor in (site.a, site.b)]
    written = [factor for factor in factors if factor.numel()]
    return _FillJob(runs=runs_of(reads, folder.files), turns=turns, slow=slow, written=written)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TurnedFactor:
    """B as it is stored, and where it belongs."""

    stored: Tensor  # [layers, outputs, rank]
    place: Tensor  # [layers, rank, outputs]
    beyond: tuple[Tensor, ...]  # ranks that these layers do not have
    scales: list[float]  # by layer

    def make(self) -> None:
        for rest in self.beyond:
            rest.zero_()
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
class _SitePart:
    """One part of a site in some layers."""

    part: str
    layers: range
    a: Tensor  # [layers, rank, inputs]
    b: Tensor  # [layers, rank, outputs]

    def expect(
        self, folder: AdapterFolder, cut_of: FactorCut, reads: list[Read], scratch: _Scratch
    ) -> _TurnedFactor | None:
        """Add the reads of all layers, which are to be made before the turn; None if they must be read one by one."""
        modules = [module_name(layer, self.part) for layer in self.layers]
        found = [folder.factors[module] for module in modules if module in folder.factors]
        ranks = {folder.config.rank_of(module) for module in modules}
        is_cut = cut_of(self.part, "a") is not None or cut_of(self.part, "b") is not None
        if is_cut or len(ranks) > 1 or len(found) < len(modules) or not all(map(self._is_alike, found)):
            return None
        rank = ranks.pop()
        stored = scratch.take(len(modules), self.b.shape[2], rank)
        self._add_reads(found, rank, stored, reads)
        beyond = (self.a[:, rank:], self.b[:, rank:]) if rank < self.a.shape[1] else ()
        return _TurnedFactor(
            stored=stored,
            place=self.b[:, :rank],
            beyond=beyond,
            scales=[folder.config.scale_of(module) for module in modules],
        )

    def _add_reads(self, found: list[Factors], rank: int, stored: Tensor, reads: list[Read]) -> None:
        a_bytes, b_bytes = self.a.view(torch.uint8).numpy(), stored.view(torch.uint8).numpy()
        for number, factors in enumerate(found):
            a, b = _both(factors)
            reads += (Read(a, a_bytes[number, :rank]), Read(b, b_bytes[number]))

    def _is_alike(self, factors: Factors) -> bool:
        a, b = _both(factors)
        return a.dtype == b.dtype == self.a.dtype

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


def _both(factors: Factors) -> tuple[StoredTensor, StoredTensor]:
    assert factors.a is not None
    assert factors.b is not None
    return factors.a, factors.b
