"""A checkpoint is read once from its PEFT folder: checked, stacked as the bank needs it, the scale folded in."""

from __future__ import annotations

import functools
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
from rota.engine.lora.files.extras import Extras, ExtrasReader
from rota.engine.lora.files.filling import FactorCut, Filling
from rota.engine.lora.files.folder import AdapterFolder, FolderFiles
from rota.engine.lora.files.outline import Inquire, answer
from rota.engine.lora.files.tensor_file import StoredTensor, TensorFile
from rota.engine.lora.files.workspace import PLAIN, LoadTemplate, Workspace
from rota.engine.lora.growth import SlotGrowth
from rota.engine.lora.host import PIECE_BYTES, HostAdapter, cut_evenly, run_length, side_by_side, stacked_sites
from rota.engine.lora.packing import Packing, Parts, SiteParts
from rota.engine.model.sites import SiteShape, module_name, site_shapes
from rota.engine.model.spec import ModelSpec
from rota.engine.parallel.shard import WHOLE, Shard
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
    shapes, cut_of = site_shapes(shard.local(spec)), functools.partial(shard.factor_cut, spec=spec)
    slots = _slots(max_rank, shard, base, embed_head, growth)
    reader = ExtrasReader(
        spec=spec, shapes=shapes, dtype=dtype, shard=shard, cut_of=cut_of, base=base, embed_head=embed_head
    )
    with FolderFiles(path, adapter_root, key_root, ask) as files:
        files.refuse_others_than(seal)
        if packing := work.packing_for(files.fingerprint):
            return _packed(files, packing, dtype, work, seal)
        template, folder = work.claim(files.fingerprint), None
        if template is None or not template.is_enough:
            folder = AdapterFolder(files, spec.layers)
            for reason in refusals(folder, spec, slots):
                raise AdapterError(reason)
            can_pack = work.packs and shard.size == 1
            if can_pack and (packing := packing_of(folder, shapes, spec.layers, dtype)):
                return _packed(files, work.keep(files.fingerprint, packing), dtype, work, seal)
            template = template or _template_of(files.fingerprint, folder, spec.layers, shapes, dtype, cut_of, work)
        if not template.fill(files.opened, folder):
            raise AdapterError(_not_finite(folder or AdapterFolder(files, spec.layers), dtype))
        extras = Extras() if folder is None else reader.read(folder, template.sites)
        for numbers in extras.tensors:
            if folder is not None and numbers.numel() and not _is_finite(numbers, work.threads):
                raise AdapterError(_not_finite(folder, numbers.dtype))
        found = files.sealed(seal)
    # Operations pass over a site without ranks.
    ranks = template.ranks if extras.gain_bias is None else template.ranks.clamp_min(1)
    return replace(work.done(HostAdapter((template.run,), template.site_ranks, ranks, *extras), template), seal=found)


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


def _template_of(
    fingerprint: bytes,
    folder: AdapterFolder,
    layers: int,
    shapes: tuple[SiteShape, ...],
    dtype: torch.dtype,
    cut_of: FactorCut,
    work: Workspace,
) -> LoadTemplate:
    by_layer = [[_rank(folder, shape, layer) for shape in shapes] for layer in range(layers)]
    ranks = torch.tensor(by_layer, dtype=torch.int32)
    site_ranks = tuple(ranks.amax(dim=0).tolist())
    run = work.take(run_length(shapes, layers, site_ranks), dtype)
    sites = stacked_sites(run, shapes, layers, site_ranks)
    scratch = work.take(sum(site.b.numel() for site in sites), dtype)
    return LoadTemplate(
        fingerprint=fingerprint,
        run=run,
        scratch=scratch,
        sites=sites,
        site_ranks=site_ranks,
        ranks=ranks,
        filling=Filling(sites, shapes, folder, cut_of, scratch, work.threads),
        is_plain=folder.is_plain,
    )


def _rank(folder: AdapterFolder, shape: SiteShape, layer: int) -> int:
    modules = [module_name(layer, part) for part, _ in shape.parts]
    return max((folder.config.rank_of(module) for module in modules if module in folder.factors), default=0)


def _is_finite(numbers: Tensor, threads: int) -> bool:
    are_finite = list[bool]()
    parts = numbers.view(-1).tensor_split(threads)
    side_by_side([functools.partial(lambda part: are_finite.append(is_finite(part)), part) for part in parts])
    return all(are_finite)


def _not_finite(folder: AdapterFolder, dtype: torch.dtype) -> str:
    too_large = f"{folder.path} has weights too large for {dtype}; serve the model in bfloat16 or float32."
    return next(values_not_finite(folder), too_large)
