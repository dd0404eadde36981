"""A table says how servers or policies fared, a line each: what `bench` and `simulate` print."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

COLUMNS = {
    "TTFT": ("ttft_s", ("mean", "median", "p99")),
    "E2E": ("e2e_s", ("mean", "median", "p90", "p99")),
    "token gap": ("itl_s", ("p99", "max")),
}
FIGURES = {
    "time to first token": "ttft_s",
    "end to end": "e2e_s",
    "time per output token": "tpot_s",
    "between two tokens": "itl_s",
    "worst pause of an answer": "gap_s",
}
WIDEST = 1000  # a figure that is cut off says nothing, so a narrow terminal has to break lines


def print_table(summaries: Mapping[str, Mapping[str, Any]], is_per_adapter: bool = False) -> None:
    """One line a summary; on request one table more for each, with a line an adapter."""
    console = Console(highlight=False, width=WIDEST)
    console.print(table(summaries))
    for name, summary in summaries.items() if is_per_adapter else ():
        console.print(table(summary["adapters"], title=name))


def print_figures(summary: Mapping[str, Any]) -> None:
    """Every figure of one summary: a line a kind of time."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    made.add_column("", no_wrap=True)
    for figure in summary["ttft_s"]:
        made.add_column(figure.replace("p9", "P9"), justify="right", no_wrap=True)
    for name, key in FIGURES.items():
        made.add_row(name, *(seconds(value) for value in summary[key].values()))
    Console(highlight=False, width=WIDEST).print(made)


def table(summaries: Mapping[str, Mapping[str, Any]], title: str | None = None) -> Table:
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    has_failed = any(summary["failed"] for summary in summaries.values())
    made.add_column("", no_wrap=True)
    for head in ("\nrequests", *(["\nfailed"] if has_failed else []), *_heads(), "output\ntok/s"):
        made.add_column(head, justify="right", no_wrap=True)
    for name, summary in summaries.items():
        counts = [summary["requests"], *([summary["failed"]] if has_failed else [])]
        times = [seconds(summary[key][figure]) for key, figures in COLUMNS.values() for figure in figures]
        made.add_row(name, *(f"{count:,.0f}" for count in counts), *times, f"{summary['output_tokens_per_s']:,.0f}")
    return made


def _heads() -> Iterator[str]:
    for group, (_, figures) in COLUMNS.items():
        for index, figure in enumerate(figures):
            yield f"{'' if index else group}\n{figure.replace('p9', 'P9')}"


def seconds(value: float) -> str:
    """A duration with as many digits as matter."""
    if value < 0.9995:
        return f"{value * 1000:.0f} ms" if value >= 0.00995 else f"{value * 1000:.1f} ms"
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{digits}f} s"
