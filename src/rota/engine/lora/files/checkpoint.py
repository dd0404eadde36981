"""A checkpoint is read once from its PEFT folder: checked, stacked as the bank needs it, the scale folded in."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rota.core.adapter import Extra
from rota.core.errors import AdapterError
from rota.engine.lora.base import BaseEmbedHead, BaseMatrices
from rota.engine.lora.files.checks import SlotKind, refusals, values_not_finite
from rota.engine.lora.files.extras import with_extras
from rota.engine.lora.files.folder import AdapterFolder, FolderFiles
from rota.engine.lora.files.outline import Inquire, answer
from rota.engine.lora.files.tensor_file import StoredTensor, TensorFile
from rota.engine.lora.files.workspace import PLAIN, Workspace
from rota.engine.lora.growth import SlotGrowth
from rota.engine.lora.host import (
    PIECE_BYTES,
    HostAdapter,
    StackedSite,
    cut_evenly,
    run_length,
    side_by_side,
    stacked_sites,
)
from rota.engine.lora.packing import Packing, Parts, SiteParts
from rota.engine.model.sites import SiteShape, module_name, site_shapes
from rota.engine.model.spec import ModelSpec
from rota.engine.parallel.shard import WHOLE, Cut, Shard
from rota.engine.weights.finite import is_finite

# ── packed file ─────────────────────────────────────────────────────────────────────────────────────────────────────
# A packed file is read into host memory as it is. Where its factors lie is found out once for all that are alike.
#
# PEFT trains and saves float32, also above a model in bfloat16. Such numbers are rounded while they are read.

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

    def read(numbers: range) -> bool:
        some = pieces[numbers.start : numbers.stop]
        start = file.data_start + numbers.start * PIECE_BYTES // dtype.itemsize * precision.itemsize
        if precision == dtype:
            file.read_into(start, [piece.numpy() for piece in some])
        else:
            _round_into([piece.view(dtype) for piece in some], file, start, precision)
        return all(is_finite(piece.view(dtype)) for piece in some)

    are_finite = side_by_side([partial(read, numbers) for numbers in cut_evenly(len(pieces), threads)])
    return pieces if all(are_finite) else None


def _can_round(stored: Sequence[StoredTensor], start: int, dtype: torch.dtype, scale: float) -> bool:
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


def _cut(factors: Sequence[StoredTensor], start: int, dtype: torch.dtype) -> Parts:
    """Where factors of a file whose tensors begin at `start` lie in its pieces."""
    parts = list[tuple[int, int, int]]()
    for stored in factors:
        first, end = ((at - start) // stored.dtype.itemsize * dtype.itemsize for at in (stored.start, stored.end))
        borders = range(first // PIECE_BYTES * PIECE_BYTES + PIECE_BYTES, end, PIECE_BYTES)
        edges = [first, *borders, end]
        parts += [(low // PIECE_BYTES, low % PIECE_BYTES, high - low) for low, high in pairwise(edges)]
    return np.array(parts, np.int64).reshape(-1, 3)


# ── filling ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# Filling brings the factors of a folder to their places in an adapter's run, factor by factor, in several threads.
#
#     file   | A of q | B of q | A of k | …
#     run    | A of q | A of k | …   | Bᵀ of q | …    A lies there as it is stored; B is turned, and scaled


def fill(
    sites: Sequence[StackedSite],
    shapes: Sequence[SiteShape],
    folder: AdapterFolder,
    spec: ModelSpec,
    shard: Shard,
    threads: int,
) -> bool:
    """Write every number of the sites: factors, and zeros where there are none. False: some are not finite.

    Blocks on the disk.
    """

    def fill_layers(layers: range) -> bool:
        for layer in layers:  # as they lie in the file
            for site, shape in zip(sites, shapes, strict=True):
                columns = torch.split(site.b[layer], list(shape.widths), dim=1)
                for (part, _), a, b in zip(shape.parts, site.a[layer], columns, strict=True):
                    cuts = shard.factor_cut(part, "a", spec), shard.factor_cut(part, "b", spec)
                    _fill_part(folder, module_name(layer, part), cuts, a, b)
        factors = [factor[layers.start : layers.stop] for site in sites for factor in (site.a, site.b)]
        return all(is_finite(factor) for factor in factors if factor.numel())

    return all(side_by_side([partial(fill_layers, layers) for layers in cut_evenly(spec.layers, threads)]))


def _fill_part(folder: AdapterFolder, module: str, cuts: tuple[Cut | None, Cut | None], a: Tensor, b: Tensor) -> None:
    """a: [rank, inputs], b: [rank, outputs]; the module's rank may be smaller, or it may have no factors."""
    factors, rank = folder.factors.get(module), 0
    if factors is not None:
        assert factors.a is not None
        assert factors.b is not None
        rank = folder.config.rank_of(module)
        a[:rank] = factors.a.read(cuts[0])
        # Scaled before it is rounded to another precision: alpha / rank need not be a power of two.
        stored = factors.b.read(cuts[1])
        wide = stored if stored.dtype == b.dtype else stored.float()
        b[:rank] = wide.mul_(folder.config.scale_of(module)).to(b.dtype).T
    a[rank:].zero_()
    b[rank:].zero_()


def read_checkpoint(
    path: str | Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    max_rank: int,
    adapter_root: str | Path | None = None,
    work: Workspace = PLAIN,
    key_root: str | Path | None = None,
    shard: Shard = WHOLE,
    base: BaseMatrices | None = None,
    embed_head: BaseEmbedHead | None = None,
    growth: SlotGrowth | None = None,
    seal: str = "",
    ask: Inquire = answer,
) -> HostAdapter:
    """Read a PEFT folder; raises AdapterError with the reason if this model cannot serve it. Blocks on the disk.

    `spec` is the whole model's. The folder is checked against it, and a rank reads only its part. With a `base` slots
    have gains and biases, and they have this `embed_head`; with `growth` they get what they lack. A workspace is for
    one bank's adapters. With the `seal` of an earlier read, files that are others by now raise AdapterChangedError:
    before they are understood if a config or a header is another, else when all numbers were read.
    """
    shapes = site_shapes(shard.local(spec))
    with FolderFiles(path, adapter_root, key_root, ask) as files:
        files.refuse_others_than(seal)
        if packing := work.packing_for(files.fingerprint):
            return _packed(files, packing, dtype, work, seal)
        folder = AdapterFolder(files, spec.layers)
        for reason in refusals(folder, spec, _slots(max_rank, shard, base, embed_head, growth)):
            raise AdapterError(reason)
        can_pack = work.packs and shard.size == 1
        if can_pack and (packing := packing_of(folder, shapes, spec.layers, dtype)):
            return _packed(files, work.keep(files.fingerprint, packing), dtype, work, seal)
        by_layer = [[_rank(folder, shape, layer) for shape in shapes] for layer in range(spec.layers)]
        ranks = torch.tensor(by_layer, dtype=torch.int32)
        site_ranks = tuple(ranks.amax(dim=0).tolist())
        size = run_length(shapes, spec.layers, site_ranks) * dtype.itemsize
        memory = work.take(size)
        run = memory[:size].view(dtype)
        sites = stacked_sites(run, shapes, spec.layers, site_ranks)
        if not fill(sites, shapes, folder, spec, shard, work.threads):
            raise AdapterError(_not_finite(folder, dtype))
        plain = HostAdapter((run,), site_ranks, ranks)
        adapter = with_extras(plain, sites, folder, spec, dtype, shard, base, embed_head)
        for numbers in adapter.extra_tensors:
            if numbers.numel() and not _is_finite(numbers, work.threads):
                raise AdapterError(_not_finite(folder, numbers.dtype))
        adapter = replace(adapter, seal=files.sealed(seal))
    if adapter.gain_bias is not None:
        adapter = replace(adapter, ranks=ranks.clamp_min(1))  # operations pass over a site without ranks
    return work.done(adapter, memory)


def _packed(files: FolderFiles, packing: Packing, dtype: torch.dtype, work: Workspace, seal: str) -> HostAdapter:
    pieces = read_packed(files.opened[0], packing.precision, dtype, work.memory, work.threads)
    if pieces is None:
        raise AdapterError(_not_finite(AdapterFolder(files), dtype))
    return HostAdapter(pieces, packing.site_ranks, packing.ranks, packing=packing, seal=files.sealed(seal))


def _slots(
    max_rank: int, shard: Shard, base: BaseMatrices | None, embed_head: BaseEmbedHead | None, growth: SlotGrowth | None
) -> SlotKind:
    extras = Extra.NONE if base is None else Extra.GAIN_BIAS
    extras = extras if embed_head is None else embed_head.extras
    places, matrix_bytes = (0, 0) if embed_head is None else (embed_head.matrices, embed_head.matrix_bytes)
    return SlotKind(max_rank, extras, shard.size, places, matrix_bytes, growth)


def _rank(folder: AdapterFolder, shape: SiteShape, layer: int) -> int:
    modules = [module_name(layer, part) for part, _ in shape.parts]
    return max((folder.config.rank_of(module) for module in modules if module in folder.factors), default=0)


def _is_finite(numbers: Tensor, threads: int) -> bool:
    return all(side_by_side([partial(is_finite, part) for part in numbers.view(-1).tensor_split(threads)]))


def _not_finite(folder: AdapterFolder, dtype: torch.dtype) -> str:
    too_large = f"{folder.path} has weights too large for {dtype}; serve the model in bfloat16 or float32."
    return next(values_not_finite(folder), too_large)
