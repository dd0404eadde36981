"""`rota bench` sends a workload to any server over HTTP and prints the figures, in all and per adapter."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from rota.bench.config import BenchConfig
from rota.commands.flags import check_outputs, config_file, make_command, quiet_flag, with_file
from rota.commands.server_call import with_key
from rota.core.options import build, options_of
from rota.engine.progress import Progress
from rota.observe.table import print_table

if TYPE_CHECKING:
    from rota.bench.run import BenchRun

MOST_PROBLEMS = 10


def bench_command() -> Callable[..., None]:
    return make_command(
        bench,
        "Measure any server over HTTP. Sends the requests of a workload, each at its time, and prints the figures of "
        "their answers, in all and per adapter.",
        options_of(BenchConfig).values(),
        config_file(),
        quiet_flag(),
    )


def bench(given: dict[str, Any]) -> None:
    chosen = with_key(with_file(given, BenchConfig))
    config = build(BenchConfig, chosen)
    check_outputs((config.json, config.output_file), config.plot)
    run = _run(config, chosen.get("quiet", False))
    found = run.report()
    _print(found, f"{config.backend}, {run.workload.title}")
    _write(config, run, {**found, "asked": _asked(config)})
    if found["failed"] == found["requests"]:
        raise typer.Exit(1)


def _run(config: BenchConfig, is_quiet: bool) -> BenchRun:
    # Imported here, so that `rota --help` does not wait for an HTTP client.
    from rota.bench.run import bench

    with ExitStack() as stack:

        def begin(requests: int) -> Callable[[], None]:
            return stack.enter_context(Progress("Asking", requests, "requests", is_quiet)).update

        return asyncio.run(bench(config, begin))


def _print(found: dict[str, Any], title: str) -> None:
    """Print one row for all requests, and one row per adapter if there are several."""
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    served = found["requests"] - found["failed"] - found["left"]
    left = f", {found['left']} left by their clients" if found["left"] else ""
    console.print(f"{title}: {served} answered, {found['failed']} failed{left}, in {found['duration_s']:.1f} s")
    print_table({"all requests": found, **(found["adapters"] if len(found["adapters"]) > 1 else {})})
    for problem, times in list(found["problems"].items())[:MOST_PROBLEMS]:
        console.print(f"{times} × {problem}")


def _write(config: BenchConfig, run: BenchRun, found: dict[str, Any]) -> None:
    if config.json:
        Path(config.json).write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    if config.output_file:
        with Path(config.output_file).open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
    if config.plot:
        from rota.bench.plot import plot  # imported here, because it loads matplotlib

        plot(run, config.backend, Path(config.plot))


def _asked(config: BenchConfig) -> dict[str, Any]:
    """The options that a file may show: without the key, and with infinity as a word, because JSON has none."""
    shown = {name: value for name, value in asdict(config).items() if name != "api_key"}
    return {name: "inf" if value == math.inf else value for name, value in shown.items()}
