"""One set of figures, read from the kept results, stands in every page that gives Rota's speed."""

from __future__ import annotations

import json
import re
from typing import Any

from benchmarks.h200.peers import MANY, TAIL_FIGURES, TAILS, TARGETS
from docs.generate.pages import DOCS
from docs.generate.tables import table

RESULTS = DOCS.parent / "benchmarks/results"
TURNS = {
    "tail-3-4": RESULTS / "h200/2026-11-19-fit/runs/tail-3-4-http-1000.json",
    "tail-3-10": RESULTS / "h200/2026-11-19-fit/runs/tail-3-10-http-1000.json",
    "many-200": RESULTS / "h200/2026-11-19-turns/many-200.json",
}
LOOPS = RESULTS / "2026-11-18-lighter.md"
SHOWN_IN = (DOCS.parent / "README.md", DOCS / "performance.md")
_BLOCK = re.compile(r"(<!-- figures: begin -->\n).*?(<!-- figures: end -->)", re.DOTALL)
_PEERS = ("vLLM", "SGLang")


def with_figures(page: str) -> str:
    """The page with today's table between its marks."""
    return _BLOCK.sub(lambda block: f"{block[1]}\n{figures()}\n\n{block[2]}", page)


def figures() -> str:
    rows = [
        *_turns("tail-3-4", "six adapters on three slots, 4 requests a second"),
        *_turns("tail-3-10", "the same at 10 requests a second"),
        *_turns("many-200", "200 adapters on 8 slots, 8 requests a second"),
        _loop("64 answers at a time, six adapters, a slot for each", "closed 64, six adapters", "closed-six"),
        _loop("… the base model alone", "closed 64, base", "closed-base"),
    ]
    return table(["one H200, over HTTP", "Rota 0.16", "vLLM 0.26", "SGLang 0.5.15"], rows)


def _turns(run: str, what: str) -> list[tuple[str, ...]]:
    """A row each for first tokens, whole answers and pauses of one workload."""
    summary = json.loads(TURNS[run].read_text("utf-8"))["summary"]
    peers: dict[str, Any] = {name: dict(zip(TAIL_FIGURES, row, strict=True)) for name, row in (TAILS | MANY)[run]}
    asked = [
        (f"**{what}**: first token, median / P99", ("ttft_s", "median"), ("ttft_s", "p99")),
        ("… whole answer, mean / P99", ("e2e_s", "mean"), ("e2e_s", "p99")),
        ("… between two tokens, P99 / longest", ("itl_s", "p99"), ("itl_s", "max")),
    ]
    rows = []
    for title, one, other in asked:
        ours = f"{_time(summary[one[0]][one[1]] * 1e3)} / {_time(summary[other[0]][other[1]] * 1e3)}"
        theirs = [
            f"{_time(peers[name][one])} / {_time(peers[name][other])}" if name in peers else "–" for name in _PEERS
        ]
        rows.append((title, ours, *theirs))
    return rows


def _loop(what: str, title: str, run: str) -> tuple[str, ...]:
    """Tokens a second of a closed loop: of ours the last column of the kept table."""
    (line,) = [line for line in LOOPS.read_text("utf-8").splitlines() if line.startswith(f"| {title} |")]
    (peers,) = [target for target in TARGETS if target.run == run]
    rates = (line.rstrip(" |").rsplit("| ", 1)[1], f"{peers.vllm:,}", f"{peers.sglang:,}")
    return f"**{what}**" if what[0] != "…" else what, *(f"{rate} tokens/s" for rate in rates)


def _time(milliseconds: float) -> str:
    """Three digits that a reader can compare."""
    if milliseconds < 1000:
        return f"{milliseconds:.0f} ms"
    return f"{milliseconds / 1000:.3g} s"
