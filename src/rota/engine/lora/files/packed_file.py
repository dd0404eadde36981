"""A packed file is read into host memory as it is. Where its factors lie is found out once for all that are alike.

PEFT trains and saves float32, also above a model in bfloat16. Such numbers are rounded while they are read.
"""

from __future__ import annotations

import math
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

# What may be rounded to bfloat16, which has the range of both.
ROUNDED = torch.float32, torch.float16
# What is read before it is rounded: it fits into a processor's own cache.
STRETCH_BYTES = 1 << 20


def packing_of(folder: AdapterFolder, shapes: Sequence[SiteShape], layers: int, dtype: torch.dtype) -> Packing | None:
    """None if the host must put the adapter together.

    It does so if there is more than factors of layers, a file that is one of several or cannot be rounded, a site whose
    factors differ in rank, or factors that differ in scale.
    """
    if not folder.is_plain or len(folder.files) > 1:
        return None
    config, start = folder.config, folder.files[0].data_start
    stored = [factor for each in folder.factors.values() for factor in (each.a, each.b) if factor is not None]
    is_all = sum(one.end - one.start for one in stored) == folder.files[0].size - start
    scales, dtypes = set(map(config.scale_of, folder.factors)), {one.dtype for one in stored}
    ranks = [{config.rank_of(module) for module in _modules(folder, shape, layers)} for shape in shapes]
    if not is_all or len(dtypes) > 1 or len(scales) > 1 or max(map(len, ranks)) > 1:
        return None
    scale, precision = scales.pop(), dtypes.pop()
    if precision != dtype and not _can_round(stored, start, dtype, scale):
        return None
    site_ranks = [max(each, default=0) for each in ranks]
    sites = [_site_of(folder, shape, layers, start, dtype) for shape in shapes]
    return Packing(
        site_ranks=tuple(site_ranks),
        ranks=torch.tensor(np.stack([site.is_there.any(1) for site in sites], 1) * np.array(site_ranks, np.int32)),
        scale=scale,
        precision=precision,
        sites=tuple(site if rank else None for site, rank in zip(sites, site_ranks, strict=True)),
    )


def read_packed(
    file: TensorFile, precision: torch.dtype, dtype: torch.dtype, memory: Callable[[int], Tensor], threads: int
) -> tuple[Tensor, ...] | None:
    """The numbers of all tensors as bytes, in pieces of memory; None if some are not finite. Blocks on the disk."""
    size = (file.size - file.data_start) // precision.itemsize * dtype.itemsize
    pieces = tuple(memory(min(PIECE_BYTES, size - start)) for start in range(0, size, PIECE_BYTES))
    are_finite = list[bool]()

    def read(numbers: range) -> None:
        some = pieces[numbers.start : numbers.stop]
        start = file.data_start + numbers.start * PIECE_BYTES // dtype.itemsize * precision.itemsize
        if precision == dtype:
            file.read_into(start, [piece.numpy() for piece in some])
        else:
            _round_into([piece.view(dtype) for piece in some], file, start, precision)
        are_finite.append(all(is_finite(piece.view(dtype)) for piece in some))

    side_by_side([partial(read, numbers) for numbers in cut_evenly(len(pieces), threads)])
    return pieces if all(are_finite) else None


def _can_round(stored: Sequence[Stored], start: int, dtype: torch.dtype, scale: float) -> bool:
    """Only a power of two may scale numbers that are rounded: for others the scale comes first."""
    is_power_of_two = math.frexp(scale)[0] == 0.5
    are_aligned = all((one.start - start) % one.dtype.itemsize == 0 for one in stored)
    return dtype is torch.bfloat16 and stored[0].dtype in ROUNDED and is_power_of_two and are_aligned


def _round_into(pieces: Sequence[Tensor], file: TensorFile, start: int, precision: torch.dtype) -> None:
    """Read a stretch at a time, and round it while it lies in the processor's cache."""
    read = torch.empty(STRETCH_BYTES // precision.itemsize, dtype=precision)
    for piece in pieces:
        for part in piece.split(len(read)):
            stretch = read[: len(part)]
            file.read_into(start, [stretch.view(torch.uint8).numpy()])
            part.copy_(stretch)
            start += stretch.nbytes


def _modules(folder: AdapterFolder, shape: SiteShape, layers: int) -> list[str]:
    """Those of a site that are there, layer after layer and part after part."""
    names = (module_name(layer, part) for layer in range(layers) for part, _ in shape.parts)
    return [name for name in names if name in folder.factors]


def _site_of(folder: AdapterFolder, shape: SiteShape, layers: int, start: int, dtype: torch.dtype) -> SiteParts:
    found = [folder.factors[module] for module in _modules(folder, shape, layers)]
    is_there = [[module_name(layer, part) in folder.factors for part, _ in shape.parts] for layer in range(layers)]
    a, b = (_cut([getattr(each, letter) for each in found], start, dtype) for letter in "ab")
    return SiteParts(a=a, b=b, is_there=np.array(is_there))


def _cut(factors: Sequence[Stored], start: int, dtype: torch.dtype) -> Parts:
    """Where factors of a file whose tensors begin at `start` lie in its pieces."""
    parts = list[tuple[int, int, int]]()
    for stored in factors:
        first, end = ((at - start) // stored.dtype.itemsize * dtype.itemsize for at in (stored.start, stored.end))
        borders = range(first // PIECE_BYTES * PIECE_BYTES + PIECE_BYTES, end, PIECE_BYTES)
        edges = [first, *borders, end]
        parts += [(low // PIECE_BYTES, low % PIECE_BYTES, high - low) for low, high in pairwise(edges)]
    return np.array(parts, np.int64).reshape(-1, 3)
