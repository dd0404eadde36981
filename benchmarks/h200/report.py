"""The report: one table of targets with pass or fail, and Rota's rows beside the peers', from the results of a folder.

python -m benchmarks.h200.report FOLDER     prints it again; several calls may have filled the folder
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rota.core.errors import ConfigError

from .fidelity import compare, fit_costs
from .peers import ISOLATION, START, TAIL_FIGURES, TAILS, TARGETS, figure
from .results import Result, read_results

TAIL_HEADS = (
    "run", "server", "TTFT mean", "median", "P99", "E2E mean", "median", "P99", "ITL median", "P99", "max", "tok/s",
)  # fmt: skip


def report(folder: Path) -> str:
    """Markdown of everything that is in the folder; also fits the cost model to the steps that are."""
    results = read_results(folder)
    lines = [
        *_section("Targets (times in ms)", _targets(results)),
        *_section("tail-ttft beside the peers (times in ms)", _tails(results)),
        *_section("base-isolation, further figures (ms)", _isolation(results)),
        *_section("osl-variance", _lengths(results)),
        *_section("All runs", _all(results)),
        *_section("Starts", _starts(folder)),
        *_section("Steps while adapters load", _loads(results)),
        *_section("The simulator against the real run", _fidelity(folder, results)),
    ]
    return "\n".join(lines)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def number(value: float | None) -> str:
    """With as many digits as matter."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _section(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield from (f"## {title}", "", *lines, "")


def _targets(results: Mapping[str, Result]) -> list[str]:
    rows = []
    for one in TARGETS:
        sign = "≥" if one.is_rate else "≤"
        wanted = [number(one.sglang), number(one.vllm), f"{sign} {number(one.must)}", f"{sign} {number(one.aim)}"]
        if one.run not in results:
            rows.append([one.what, *wanted, "not run", ""])
            continue
        value = one.value(results[one.run])
        rows.append([one.what, *wanted, f"{number(value)} ({results[one.run]['via']})", one.verdict(value)])
    return table(("workload", "SGLang", "vLLM", "must", "aim", "Rota", "reached"), rows)


def _tails(results: Mapping[str, Result]) -> list[str]:
    rows = []
    for run, peers in TAILS.items():
        rows += [[run, peer, *map(number, figures)] for peer, figures in peers]
        if run in results:
            found = [number(figure(results[run]["summary"], path)) for path in TAIL_FIGURES]
            rows.append([run, f"**Rota** ({results[run]['via']})", *found])
    return table(TAIL_HEADS, rows)


def _isolation(results: Mapping[str, Result]) -> list[str]:
    rows = [
        [what, number(sglang), number(vllm), number(figure(results[run]["summary"], path))]
        for what, run, path, sglang, vllm in ISOLATION
        if run in results
    ]
    return table(("", "SGLang", "vLLM", "Rota"), rows) if rows else []


def _lengths(results: Mapping[str, Result]) -> list[str]:
    rows = []
    for name, result in results.items():
        if name.startswith("osl"):
            summary = result["summary"]
            gap = summary["itl_s"]
            rows.append([name, number(summary["output_tokens_per_s"]), number(gap["p99"] * 1e3)])
    return table(("run", "tok/s", "ITL P99, ms"), rows) if rows else []


def _all(results: Mapping[str, Result]) -> list[str]:
    rows = []
    for name, result in results.items():
        summary = result["summary"]
        counts = [f"{summary['requests']:,}", f"{summary['failed']:,}"]
        figures = [number(figure(summary, path)) for path in TAIL_FIGURES]
        rows.append([name, result["via"], *counts, *figures])
    return table(("run", "via", "requests", "failed", *TAIL_HEADS[2:]), rows) if rows else []


def _starts(folder: Path) -> list[str]:
    starts = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("start-*.json"))]
    sglang, vllm, must, aim = START
    rows = [
        [
            f"{start['via']}, {start['slots']} slots, {start['adapters']} adapters, weights {start['weights']}",
            number(start["start_s"]),
            number(start["peak_rss_gb"]),
            "aim" if start["start_s"] <= aim else "must" if start["start_s"] <= must else "MISSED",
        ]
        for start in starts
    ]
    heads = ("server", f"start to ready, s (SGLang {sglang}, vLLM {vllm}; must ≤ {must:g}, aim ≤ {aim:g})")
    return table((*heads, "peak host RSS, GB", "reached"), rows) if rows else []


def _loads(results: Mapping[str, Result]) -> list[str]:
    if "loads" not in results:
        return []
    return table(("", ""), [[name, json.dumps(value)] for name, value in results["loads"]["beside_loads"].items()])


def _fidelity(folder: Path, results: Mapping[str, Result]) -> list[str]:
    """Steps and loads measured here, a cost model from them, and its word for the runs that are here too."""
    loads: Any = results.get("loads", {}).get("beside_loads", {}).get("load ms")
    try:
        fit = fit_costs(folder, loads["median"] / 1e3 if loads else None)
    except ConfigError as error:  # too few steps: the rest of the report is worth having
        return [str(error)]
    if fit is None:
        return []
    rows = []
    for run, figures in compare(fit.cost, results).items():
        for what, pair in figures.items():
            rows.append([run, what, number(pair["real"]), number(pair["simulated"]), f"{pair['error']:+.0%}"])
    head = f"{fit}; written to {folder.name}/{fit.cost.name}.toml."
    return [head, "", *table(("run", "figure", "real", "simulated", "error"), rows)]


def main() -> None:
    folder = Path(sys.argv[1])
    text = report(folder)
    (folder / "report.md").write_text(text + "\n", "utf-8")
    print(text)


if __name__ == "__main__":
    main()
