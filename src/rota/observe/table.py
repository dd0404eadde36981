"""Tables compare servers, policies or adapters, one line each; `bench` and `simulate` print them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

Summaries = Mapping[str, Mapping[str, Any]]

COUNTS = {
    "requests": ("requests", "{:,.0f}"),
    "failed": ("failed", "{:,.0f}"),
    "left": ("left", "{:,.0f}"),
    "duration": ("duration_s", "{:,.1f} s"),
    "requests/s": ("requests_per_s", "{:,.2f}"),
    "input tok/s": ("input_tokens_per_s", "{:,.0f}"),
    "output tok/s": ("output_tokens_per_s", "{:,.0f}"),
    "loads": ("loads", "{:,.0f}"),  # of several replicas only
    "reads": ("reads", "{:,.0f}"),
    "fairness": ("fairness", "{:.3f}"),  # only a whole summary has it, not an adapter's
}
TIMES = {
    "time to first token (TTFT)": "ttft_s",
    "end to end (E2E)": "e2e_s",
    "time per output token (TPOT)": "tpot_s",
    "between two tokens (ITL)": "itl_s",
    "worst pause of an answer": "gap_s",
    "longest that its reader stands": "stall_s",
}
FIGURES = {"mean": "mean", "median": "median", "P90": "p90", "P95": "p95", "P99": "p99", "max": "max"}
WIDEST = 1000  # a narrow terminal breaks lines, since a figure that is cut off says nothing


def by_number(name: str) -> list[tuple[int, str]]:
    """A key for sorting: adapter2 comes before adapter10."""
    return [(int(digits or 0), text) for text, digits in re.findall(r"(\D*)(\d*)", name)]


def print_table(summaries: Summaries, is_per_adapter: bool = False, is_per_replica: bool = False) -> None:
    """Counts, rates and times, one line for each summary; also the same for its tenants, and if asked for its replicas
    and for its adapters."""
    # Names come from users: text that looks like markup is not markup.
    console = Console(highlight=False, markup=False, emoji=False, width=WIDEST)
    console.print(*_tables(summaries), sep="")
    for name, summary in summaries.items():
        if "tenants" in summary:
            console.print(*_tables(summary["tenants"], title=f"{name}, by tenant"), sep="")
        if is_per_replica and "replicas" in summary:
            console.print(*_tables(summary["replicas"], title=f"{name}, by replica"), sep="")
        if is_per_adapter:
            console.print(*_tables(summary["adapters"], title=name), sep="")


def _tables(summaries: Summaries, title: str | None = None) -> Iterator[Table]:
    """Two narrow tables, since one with all figures would be as wide as three terminals."""
    yield _counts(summaries, title)
    yield _times(summaries)


def _counts(summaries: Summaries, title: str | None) -> Table:
    known = {key for summary in summaries.values() for key in summary}
    shown = {head: count for head, count in COUNTS.items() if count[0] in known}
    reasons = sorted({reason for summary in summaries.values() for reason in summary.get("failures", ())})
    made = _table("", *shown, *(f"failed: {reason}" for reason in reasons), title=title)
    for name, summary in summaries.items():
        counts = [form.format(summary[key]) if key in summary else "" for key, form in shown.values()]
        made.add_row(name, *counts, *(f"{summary.get('failures', {}).get(reason, 0):,.0f}" for reason in reasons))
    return made


def _times(summaries: Summaries) -> Table:
    """A block for each kind of time, so that figures to compare are below each other."""
    made = _table("", "", *FIGURES)
    for kind, key in TIMES.items():
        for index, (name, summary) in enumerate(summaries.items()):
            made.add_row("" if index else kind, name, *_figures(summary[key]))
        if len(summaries) > 1:
            made.add_section()
    return made


def _figures(spread: Mapping[str, float]) -> Iterator[str]:
    """A dash if nothing was measured: zeros would look like a record."""
    return (seconds(spread[figure]) if spread["max"] else "–" for figure in FIGURES.values())


def _table(*heads: str, title: str | None = None) -> Table:
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for head in heads:
        made.add_column(head, justify="right" if head else "left", no_wrap=True)
    return made


def seconds(value: float) -> str:
    """A duration with the digits that matter."""
    if value < 0.9995:
        return f"{value * 1000:.0f} ms" if value >= 0.00995 else f"{value * 1000:.1f} ms"
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{digits}f} s"
