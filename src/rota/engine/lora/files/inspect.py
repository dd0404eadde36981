"""An AdapterDescription says what an adapter folder holds, before it is served."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rota.engine.lora.files.checks import SlotKind, refusals, values_not_finite
from rota.engine.lora.files.folder import AdapterFolder, FolderFiles
from rota.engine.model.sites import PARENTS
from rota.engine.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class AdapterDescription:
    """The content of an adapter folder, and the reasons why it cannot be served, if any."""

    path: Path
    base_model: str | None  # the name in its config
    ranks: tuple[int, ...]  # all that occur, smallest first
    alpha: float
    is_rank_stabilised: bool
    modules: tuple[str, ...]  # q_proj, k_proj, …
    layers: tuple[int, ...]
    dtypes: tuple[str, ...]
    size_bytes: int  # of its files
    reasons: tuple[str, ...]  # why the model cannot serve it; empty if it can


def describe(path: str | Path, spec: ModelSpec | None, max_rank: int | None = None) -> AdapterDescription:
    """Describe a PEFT folder, with reasons why the model of `spec` cannot serve it; blocks on the disk.

    Without a spec, the reasons hold for any model. Raises AdapterError only if the folder or its files cannot be read.
    """
    with FolderFiles(path) as files:
        folder = AdapterFolder(files, spec.layers if spec else 0)
        reasons = tuple(refusals(folder, spec, SlotKind(max_rank))) or tuple(islice(values_not_finite(folder), 1))
        stored = [tensor for file in folder.files for tensor in file.tensors.values()]
        changed = {*folder.factors, *folder.tokens, *folder.matrices}
        parts = {module.rpartition(".")[2] for module in changed}
        return AdapterDescription(
            path=folder.path,
            base_model=folder.config.base_model,
            ranks=tuple(sorted({folder.config.rank_of(module) for module in folder.factors})),
            alpha=folder.config.alpha,
            is_rank_stabilised=folder.config.is_rank_stabilised,
            modules=(*(part for part in PARENTS if part in parts), *sorted(parts.difference(PARENTS))),
            layers=_layers(folder),
            dtypes=tuple(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in stored})),
            size_bytes=sum(file.size for file in folder.files),
            reasons=reasons,
        )


def _layers(folder: AdapterFolder) -> tuple[int, ...]:
    found = {re.match(r"model\.layers\.(\d+)\.", module) for module in folder.factors}
    return tuple(sorted({int(match[1]) for match in found if match is not None}))
