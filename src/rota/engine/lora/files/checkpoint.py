"""A checkpoint is read once from its PEFT folder: checked, stacked as the bank needs it, the scale folded in."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from rota.core.errors import AdapterError
from rota.core.extras import Extra
from rota.engine.lora.base_ends import BaseEnds
from rota.engine.lora.base_matrices import BaseMatrices
from rota.engine.lora.files.checks import SlotKind, refusals, values_not_finite
from rota.engine.lora.files.end_factors import read_ends, read_own
from rota.engine.lora.files.filling import FactorCut, fill
from rota.engine.lora.files.folder import AdapterFolder
from rota.engine.lora.files.folding import Folding
from rota.engine.lora.files.names import EMBEDDING, HEAD
from rota.engine.lora.files.workspace import PLAIN, Workspace
from rota.engine.lora.growth import Growth
from rota.engine.lora.host import HostAdapter, StackedSite, run_length, stacked_sites
from rota.engine.lora.side_by_side import side_by_side
from rota.engine.model.sites import SiteShape, module_name, site_shapes
from rota.engine.model.spec import ModelSpec
from rota.engine.parallel.shard import WHOLE, Cut, Shard
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
) -> HostAdapter:
    """Read a PEFT folder; raises AdapterError with the reason if this model cannot serve it. Blocks on the disk.

    `spec` is the whole model's. The folder is checked against it, and a rank reads only its part. With a `base` slots
    have trims, and they have these `ends`; with `growth` they get what they lack.
    """
    shapes = site_shapes(shard.local(spec))
    extras = Extra.NONE if base is None else Extra.TRIMS
    extras = extras if ends is None else ends.extras
    places, matrix_bytes = (0, 0) if ends is None else (ends.matrices, ends.matrix_bytes)
    slots = SlotKind(max_rank, extras, shard.size, places, matrix_bytes, growth)
    with AdapterFolder(path, adapter_root, key_root) as folder:
        for reason in refusals(folder, spec, slots):
            raise AdapterError(reason)
        ranks = torch.tensor(
            [[_rank(folder, shape, layer) for shape in shapes] for layer in range(spec.layers)], dtype=torch.int32
        )
        site_ranks = tuple(ranks.amax(dim=0).tolist())
        run = work.take(run_length(shapes, spec.layers, site_ranks), dtype)
        sites = stacked_sites(run, shapes, spec.layers, site_ranks)
        cut_of = functools.partial(shard.factor_cut, spec=spec)
        fill(sites, shapes, folder, cut_of, work.threads)
        trims = None if base is None else _folded(folder, base, shard, cut_of, shapes, sites)
        embedding, head = None, None
        if ends is not None:
            with nullcontext() if base is None else base.alone():
                embedding, head = read_ends(folder, spec, ends, dtype, shard.tokens(spec.vocab_size))
        every, own = Cut(0, 0, spec.vocab_size, spec.vocab_size), shard.tokens(spec.vocab_size)
        matrices = (read_own(folder, EMBEDDING, dtype, every), read_own(folder, HEAD, dtype, own))
        at_ends = [tensor for end in (embedding, head) if end for tensor in end.tensors]
        for numbers in (run, trims, *at_ends, *(piece for pieces in matrices for piece in pieces or ())):
            if numbers is not None and numbers.numel():
                _check_values(numbers, folder, work.threads)
    if trims is not None:
        ranks.clamp_min_(1)  # operations pass over a site without ranks
    adapter = HostAdapter((run,), site_ranks, ranks, trims, embedding, head, *matrices)
    return work.done(adapter)


def _folded(
    folder: AdapterFolder,
    base: BaseMatrices,
    shard: Shard,
    cut_of: FactorCut,
    shapes: tuple[SiteShape, ...],
    sites: list[StackedSite],
) -> Tensor | None:
    """The adapter's trims, if it has any."""
    if not (folder.config.is_dora or folder.config.has_factor_biases or folder.biases):
        return None
    cut = functools.partial(_cut_of_outputs, cut_of)
    return Folding(folder=folder, base=base, cut_of=cut, adds_biases=shard.rank == 0).trims(shapes, sites)


def _cut_of_outputs(cut_of: FactorCut, part: str) -> Cut | None:
    """B's stretch is that of the outputs."""
    return cut_of(part, "b")


def _rank(folder: AdapterFolder, shape: SiteShape, layer: int) -> int:
    modules = [module_name(layer, part) for part, _ in shape.parts]
    return max((folder.config.rank_of(module) for module in modules if module in folder.factors), default=0)


def _check_values(run: Tensor, folder: AdapterFolder, threads: int) -> None:
    are_finite = list[bool]()
    parts = run.view(-1).tensor_split(threads)
    side_by_side([functools.partial(lambda part: are_finite.append(is_finite(part)), part) for part in parts])
    if not all(are_finite):
        too_large = f"{folder.path} has weights too large for {run.dtype}; serve the model in bfloat16 or float32."
        raise AdapterError(next(values_not_finite(folder), too_large))
