"""`rota adapters inspect` says what is in an adapter folder and whether a model can serve it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rota.engine.lora.files.folder import AdapterFolder
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


def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The adapter's folder, as PEFT saves it.")],
    model: Annotated[
        Path | None, typer.Option(metavar="MODEL", help="The folder of the model that is to serve the adapter.")
    ] = None,
    max_lora_rank: Annotated[
        int | None,
        typer.Option(help="The --max-lora-rank of the server; left out: its slots are made for the adapter."),
    ] = None,
) -> None:
    """Say what is in an adapter, and whether MODEL, or any model, can serve it. The exit code is 1 if not."""
    # Imported here, so that `rota --help` does not wait for torch.
    from rota.engine.families.table import read_spec

    description = describe(path, read_spec(model) if model else None, max_lora_rank)
    console = Console(highlight=False, soft_wrap=True)
    console.print(_table(description))
    for line in _verdict(description.reasons, model):
        console.print(Text(line))
    if description.reasons:
        raise typer.Exit(1)


def describe(path: str | Path, spec: ModelSpec | None, max_rank: int | None = None) -> AdapterDescription:
    """Describe a PEFT folder, with reasons why the model of `spec` cannot serve it; blocks on the disk.

    Without a spec, the reasons hold for any model. Raises AdapterError only if the folder or its files cannot be read.
    """
    # Imported here, so that `rota --help` does not wait for torch.
    from rota.engine.lora.files.checks import SlotKind, refusals, values_not_finite
    from rota.engine.lora.files.folder import AdapterFolder, FolderFiles
    from rota.engine.model.sites import PARENTS

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


def _table(description: AdapterDescription) -> Table:
    layers = description.layers
    stability = " (rank-stabilised)" if description.is_rank_stabilised else ""
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    for name, value in {
        "folder": str(description.path),
        "made for": description.base_model or "(not given)",
        "rank": ", ".join(map(str, description.ranks)),
        "alpha": f"{description.alpha:g}{stability}",
        "modules": ", ".join(description.modules),
        "layers": f"{len(layers)}, from {layers[0]} to {layers[-1]}" if layers else "none",
        "stored as": f"{', '.join(description.dtypes)}, {decimal(description.size_bytes)}",
    }.items():
        table.add_row(name, Text(value, overflow="fold"))
    return table


def _verdict(reasons: tuple[str, ...], model: Path | None) -> Iterator[str]:
    if reasons:
        yield f"The model in {model} cannot serve it:" if model else "No model can serve it:"
        yield from (f"- {reason}" for reason in reasons)
    elif model:
        yield f"The model in {model} can serve it."
    else:
        yield "Nothing is wrong with it. Name a model with --model to know whether that model can serve it."
