"""`rota adapters inspect` says what is in an adapter folder and whether a model can serve it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rota.engine.lora.files.inspect import AdapterDescription


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
    from rota.engine.lora.files.inspect import describe

    description = describe(path, read_spec(model) if model else None, max_lora_rank)
    console = Console(highlight=False, soft_wrap=True)
    console.print(_table(description))
    for line in _verdict(description.reasons, model):
        console.print(Text(line))
    if description.reasons:
        raise typer.Exit(1)


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
