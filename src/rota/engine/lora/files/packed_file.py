"""A packed file is read into host memory as it is. Where its factors lie is found out once for all that are alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from rota.engine.lora.copies.packing import Packing, Parts, SiteParts
from rota.engine.lora.files.folder import AdapterFolder
from rota.engine.lora.files.tensor_file import Stored, TensorFile
from rota.engine.lora.host import PIECE_BYTES
from rota.engine.lora.side_by_side import cut_evenly, side_by_side
from rota.engine.model.sites import SiteShape, module_name
from rota.engine.weights.finite import is_finite


def packing_of(folder: AdapterFolder, shapes: Sequence[SiteShape], layers: int, dtype: torch.dtype) -> Packing | None:
    """None if the host must put the adapter together.

    It does so if there is more than factors of layers, a file that is one of several or of another precision, a site
    whose factors differ in rank, or factors that differ in scale.
    """
    if not folder.is_plain or len(folder.files) > 1:
        return None
    config, start = folder.config, folder.files[0].data_start
    stored = [factor for each in folder.factors.values() for factor in (each.a, each.b) if factor is not None]
    is_all = sum(one.end - one.start for one in stored) == folder.files[0].size - start
    scales = set(map(config.scale_of, folder.factors))
    ranks = [{config.rank_of(module) for module in _modules(folder, shape, layers)} for shape in shapes]
    if not is_all or {one.dtype for one in stored} != {dtype} or len(scales) > 1 or max(map(len, ranks)) > 1:
        return None
    site_ranks = [max(each, default=0) for each in ranks]
    sites = [_site_of(folder, shape, layers, start) for shape in shapes]
    return Packing(
        site_ranks=tuple(site_ranks),
        ranks=torch.tensor(np.stack([site.is_there.any(1) for site in sites], 1) * np.array(site_ranks, np.int32)),
        scale=scales.pop(),
        sites=tuple(site if rank else None for site, rank in zip(sites, site_ranks, strict=True)),
    )


def read_packed(
    file: TensorFile, dtype: torch.dtype, memory: Callable[[int], Tensor], threads: int
) -> tuple[Tensor, ...] | None:
    """The bytes of all tensors, in pieces of memory; None if some numbers are not finite. Blocks on the disk."""
    size = file.size - file.data_start
    pieces = tuple(memory(min(PIECE_BYTES, size - start)) for start in range(0, size, PIECE_BYTES))
    are_finite = list[bool]()

    def read(numbers: range) -> None:
        some = pieces[numbers.start : numbers.stop]
        file.read_into(file.data_start + numbers.start * PIECE_BYTES, [piece.numpy() for piece in some])
        are_finite.append(all(is_finite(piece.view(dtype)) for piece in some))

    side_by_side([partial(read, numbers) for numbers in cut_evenly(len(pieces), threads)])
    return pieces if all(are_finite) else None


def _modules(folder: AdapterFolder, shape: SiteShape, layers: int) -> list[str]:
    """Those of a site that are there, layer after layer and part after part."""
    names = (module_name(layer, part) for layer in range(layers) for part, _ in shape.parts)
    return [name for name in names if name in folder.factors]


def _site_of(folder: AdapterFolder, shape: SiteShape, layers: int, start: int) -> SiteParts:
    found = [folder.factors[module] for module in _modules(folder, shape, layers)]
    is_there = [[module_name(layer, part) in folder.factors for part, _ in shape.parts] for layer in range(layers)]
    a, b = (_cut([getattr(each, letter) for each in found], start) for letter in "ab")
    return SiteParts(a=a, b=b, is_there=np.array(is_there))


def _cut(factors: Sequence[Stored], start: int) -> Parts:
    """Where factors lie in the pieces of a file whose tensors begin at `start`."""
    parts = list[tuple[int, int, int]]()
    for stored in factors:
        first, end = stored.start - start, stored.end - start
        borders = range(first // PIECE_BYTES * PIECE_BYTES + PIECE_BYTES, end, PIECE_BYTES)
        edges = [first, *borders, end]
        parts += [(low // PIECE_BYTES, low % PIECE_BYTES, high - low) for low, high in pairwise(edges)]
    return np.array(parts, np.int64).reshape(-1, 3)
