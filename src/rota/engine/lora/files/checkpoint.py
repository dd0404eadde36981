"""A checkpoint is read once from its PEFT folder: checked, stacked as the bank needs it, the scale folded in."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rota.core.errors import AdapterError
from rota.core.extras import Extra
from rota.engine.lora.base_ends import BaseEnds
from rota.engine.lora.base_matrices import BaseMatrices
from rota.engine.lora.copies.packing import Packing
from rota.engine.lora.files.checks import SlotKind, refusals, values_not_finite
from rota.engine.lora.files.filling import FactorCut, Filling
from rota.engine.lora.files.folder import AdapterFolder
from rota.engine.lora.files.folder_files import FolderFiles
from rota.engine.lora.files.mould import Mould
from rota.engine.lora.files.outline import Ask, answer
from rota.engine.lora.files.packed_file import packing_of, read_packed
from rota.engine.lora.files.read_extras import Extras, ExtrasReader
from rota.engine.lora.files.workspace import PLAIN, Workspace
from rota.engine.lora.growth import Growth
from rota.engine.lora.host import HostAdapter, run_length, stacked_sites
from rota.engine.lora.side_by_side import side_by_side
from rota.engine.model.sites import SiteShape, module_name, site_shapes
from rota.engine.model.spec import ModelSpec
from rota.engine.parallel.shard import WHOLE, Shard
from rota.engine.weights.finite import is_finite


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
    ends: BaseEnds | None = None,
    growth: Growth | None = None,
    seal: str = "",
    ask: Ask = answer,
) -> HostAdapter:
    """Read a PEFT folder; raises AdapterError with the reason if this model cannot serve it. Blocks on the disk.

    `spec` is the whole model's. The folder is checked against it, and a rank reads only its part. With a `base` slots
    have trims, and they have these `ends`; with `growth` they get what they lack. A workspace is for one bank's
    adapters. With the `seal` of an earlier read, files that are others by now raise AdapterChangedError: before they
    are understood if a config or a header is another, else when all numbers were read.
    """
    shapes, cut_of = site_shapes(shard.local(spec)), functools.partial(shard.factor_cut, spec=spec)
    slots = _slots(max_rank, shard, base, ends, growth)
    reader = ExtrasReader(spec=spec, shapes=shapes, dtype=dtype, shard=shard, cut_of=cut_of, base=base, ends=ends)
    with FolderFiles(path, adapter_root, key_root, ask) as files:
        files.refuse_others_than(seal)
        if packing := work.packing_for(files.fingerprint):
            return _packed(files, packing, dtype, work, seal)
        mould, folder = work.claim(files.fingerprint), None
        if mould is None or not mould.is_enough:
            folder = AdapterFolder(files, spec.layers)
            for reason in refusals(folder, spec, slots):
                raise AdapterError(reason)
            can_pack = work.packs and shard.size == 1
            if can_pack and (packing := packing_of(folder, shapes, spec.layers, dtype)):
                return _packed(files, work.keep(files.fingerprint, packing), dtype, work, seal)
            mould = mould or _mould_of(files.fingerprint, folder, spec.layers, shapes, dtype, cut_of, work)
        if not mould.fill(files.opened, folder):
            raise AdapterError(_not_finite(folder or AdapterFolder(files, spec.layers), dtype))
        extras = Extras() if folder is None else reader.read(folder, mould.sites)
        for numbers in extras.tensors:
            if folder is not None and numbers.numel() and not _is_finite(numbers, work.threads):
                raise AdapterError(_not_finite(folder, numbers.dtype))
        found = files.sealed(seal)
    # Operations pass over a site without ranks.
    ranks = mould.ranks if extras.trims is None else mould.ranks.clamp_min(1)
    return replace(work.done(HostAdapter((mould.run,), mould.site_ranks, ranks, *extras), mould), seal=found)


def _packed(files: FolderFiles, packing: Packing, dtype: torch.dtype, work: Workspace, seal: str) -> HostAdapter:
    pieces = read_packed(files.opened[0], packing.precision, dtype, work.memory, work.threads)
    if pieces is None:
        raise AdapterError(_not_finite(AdapterFolder(files), dtype))
    return HostAdapter(pieces, packing.site_ranks, packing.ranks, packing=packing, seal=files.sealed(seal))


def _slots(
    max_rank: int, shard: Shard, base: BaseMatrices | None, ends: BaseEnds | None, growth: Growth | None
) -> SlotKind:
    extras = Extra.NONE if base is None else Extra.TRIMS
    extras = extras if ends is None else ends.extras
    places, matrix_bytes = (0, 0) if ends is None else (ends.matrices, ends.matrix_bytes)
    return SlotKind(max_rank, extras, shard.size, places, matrix_bytes, growth)


def _mould_of(
    fingerprint: bytes,
    folder: AdapterFolder,
    layers: int,
    shapes: tuple[SiteShape, ...],
    dtype: torch.dtype,
    cut_of: FactorCut,
    work: Workspace,
) -> Mould:
    by_layer = [[_rank(folder, shape, layer) for shape in shapes] for layer in range(layers)]
    ranks = torch.tensor(by_layer, dtype=torch.int32)
    site_ranks = tuple(ranks.amax(dim=0).tolist())
    run = work.take(run_length(shapes, layers, site_ranks), dtype)
    sites = stacked_sites(run, shapes, layers, site_ranks)
    scratch = work.take(sum(site.b.numel() for site in sites), dtype)
    return Mould(
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
