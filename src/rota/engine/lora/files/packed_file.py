"""A packed file is read into host memory as it is. Where its factors lie is found out once for all that are alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from rota.engine.lora.files.folder import AdapterFolder
from rota.engine.lora.files.tensor_file import Stored, TensorFile
from rota.engine.lora.host import PIECE_BYTES
from rota.engine.lora.packing import Packing, Parts, SiteParts
from rota.engine.lora.side_by_side import cut_evenly, side_by_side
from rota.engine.model.sites import SiteShape, module_name
from rota.engine.weights.finite import is_finite


def packing_of(folder: AdapterFolder, shapes: Sequence[SiteShape], layers: int, dtype: torch.dtype) -> Packing | None:
    """None if the host must put the adapter together.

    It does so if there is more than factors of layers, a file that is one of several or of another precision, a site of
    which parts or layers are missing or differ in rank, or factors that differ in scale.
    """
    sites = [_factors(folder, shape, layers) for shape in shapes]
    if not folder.is_plain or len(folder.files) > 1 or None in sites:
        return None
    modules = [(module, a, b) for site in sites if site is not None for module, a, b in site]
    scales = {folder.config.scale_of(module) for module, _, _ in modules}
    stored = [factor for _, a, b in modules for factor in (a, b)]
    size, start = sum(one.end - one.start for one in stored), folder.files[0].data_start
    if len(scales) > 1 or {one.dtype for one in stored} != {dtype} or size != folder.files[0].size - start:
        return None
    site_ranks = tuple(folder.config.rank_of(site[0][0]) if site else 0 for site in sites)
    return Packing(
        site_ranks=site_ranks,
        ranks=torch.tensor([site_ranks] * layers, dtype=torch.int32),
        scale=scales.pop(),
        sites=tuple(_parts_of(site, start) if site else None for site in sites),
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


def _factors(folder: AdapterFolder, shape: SiteShape, layers: int) -> list[tuple[str, Stored, Stored]] | None:
    """Module, A and B of each layer and part, empty if there are none; None if they are not alike."""
    modules = [module_name(layer, part) for layer in range(layers) for part, _ in shape.parts]
    found = [(module, folder.factors[module]) for module in modules if module in folder.factors]
    if not found:
        return []
    both = [(module, each.a, each.b) for module, each in found if each.a is not None and each.b is not None]
    ranks = {folder.config.rank_of(module) for module in modules}
    return both if len(both) == len(modules) and len(ranks) == 1 else None


def _parts_of(site: Sequence[tuple[str, Stored, Stored]], start: int) -> SiteParts:
    return SiteParts(a=_cut([a for _, a, _ in site], start), b=_cut([b for _, _, b in site], start))


def _cut(factors: Sequence[Stored], start: int) -> Parts:
    """Where factors lie in the pieces of a file whose tensors begin at `start`."""
    parts = list[tuple[int, int, int]]()
    for stored in factors:
        first, end = stored.start - start, stored.end - start
        borders = range(first // PIECE_BYTES * PIECE_BYTES + PIECE_BYTES, end, PIECE_BYTES)
        edges = [first, *borders, end]
        parts += [(low // PIECE_BYTES, low % PIECE_BYTES, high - low) for low, high in pairwise(edges)]
    return np.array(parts, np.int64)
