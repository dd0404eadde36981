"""A checkpoint is read once from its PEFT folder: checked, stacked as the bank needs it, the scale folded in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from rota.core.errors import AdapterError
from rota.engine.lora.files.checks import refusals, values_not_finite
from rota.engine.lora.files.folder import AdapterFolder
from rota.engine.lora.host import HostAdapter, StackedSite, pin, run_length, stacked_sites
from rota.engine.model.sites import SiteShape, module_name, site_shapes
from rota.engine.model.spec import ModelSpec
from rota.engine.parallel.shard import WHOLE, Cut, Shard
from rota.engine.weights.finite import is_finite

# (part, letter): which stretch of a factor is read.
FactorCut = Callable[[str, Literal["a", "b"]], Cut | None]


def read_checkpoint(
    path: str | Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    max_rank: int,
    adapter_root: str | Path | None = None,
    is_pinned: bool = False,
    key_root: str | Path | None = None,
    shard: Shard = WHOLE,
) -> HostAdapter:
    """Read a PEFT folder; raises AdapterError with the reason if this model cannot serve it. Blocks on the disk.

    `spec` is the whole model's. The folder is checked against it, and a rank reads only its part.
    """
    shapes = site_shapes(shard.local(spec))
    with AdapterFolder(path, adapter_root, key_root) as folder:
        for reason in refusals(folder, spec, max_rank):
            raise AdapterError(reason)
        ranks = torch.tensor(
            [[_rank(folder, shape, layer) for shape in shapes] for layer in range(spec.layers)], dtype=torch.int32
        )
        site_ranks = tuple(ranks.amax(dim=0).tolist())
        run = torch.zeros(run_length(shapes, spec.layers, site_ranks), dtype=dtype)
        for shape, site in zip(shapes, stacked_sites(run, shapes, spec.layers, site_ranks), strict=True):
            _fill(site, shape, folder, functools.partial(shard.factor_cut, spec=spec))
        _check_values(run, folder)
    if is_pinned:
        return HostAdapter(pin(run), site_ranks, ranks.pin_memory())
    return HostAdapter((run,), site_ranks, ranks)


def _rank(folder: AdapterFolder, shape: SiteShape, layer: int) -> int:
    modules = [module_name(layer, part) for part, _ in shape.parts]
    return max((folder.config.rank_of(module) for module in modules if module in folder.factors), default=0)


def _fill(site: StackedSite, shape: SiteShape, folder: AdapterFolder, cut_of: FactorCut) -> None:
    for layer, (a, b) in enumerate(zip(site.a, site.b, strict=True)):
        columns = torch.split(b, list(shape.widths), dim=1)
        for (part, _), part_a, part_b in zip(shape.parts, a, columns, strict=True):
            module = module_name(layer, part)
            if module not in folder.factors:
                continue
            factors, rank = folder.factors[module], folder.config.rank_of(module)
            assert factors.a is not None
            assert factors.b is not None
            part_a[:rank] = factors.a.read(cut_of(part, "a"))
            # Scaled before rounding: alpha / rank need not be a power of two.
            part_b[:rank] = factors.b.read(cut_of(part, "b")).float().mul_(folder.config.scale_of(module)).T


def _check_values(run: Tensor, folder: AdapterFolder) -> None:
    if not is_finite(run):
        too_large = f"{folder.path} has weights too large for {run.dtype}; serve the model in bfloat16 or float32."
        raise AdapterError(next(values_not_finite(folder), too_large))
