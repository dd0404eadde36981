"""Measures Rota on one GPU: every workload, beside the peers' rows and the targets.

    python -m benchmarks.h200 [--only NAME,…] [--in-process] [--out FOLDER] [--minutes N]

Makes a random model and adapters once in a temporary folder, starts `rota serve` once for each number of slots, and
asks it what the scenarios say: greedy, to full length, prefix cache off. Each result is written as it comes, and at
the end one table. With `--shape tiny` all of it runs on a CPU in a moment, to try the script.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from rota.core.errors import RotaError
from rota.runtime.lifeline import tied

from .assets import is_made
from .in_process import InProcessServer
from .loads import beside_loads
from .over_http import HttpServer
from .report import report
from .results import describe, summarise, write_result
from .runs import START_S, Run, choose, group, lengthened, probe, warm_up, within
from .server import Asked, Server
from .shapes import RANK, SHAPES, Shape

WARM_UP_LIMIT_S = 180.0
PROBE_LIMIT_S = 60.0
# A run that takes so many times what it should, and this much more, is stuck.
PATIENCE = 3.0
SPARE_S = 30.0


@dataclass(slots=True)
class Session:
    """One call of this script."""

    folder: Path  # of assets
    out: Path
    shape: Shape
    options: dict[str, Any]  # of every server
    weights: str
    seed: int
    in_process: bool
    deadline: float
    rest_s: float  # after the warm-up: graphs of steps with prompts are captured by an engine that is idle
    facts: dict[str, Any]
    left_out: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def measure(self, runs: Sequence[Run]) -> None:
        """One server after another, each for all its runs."""
        for members in group(runs, self.in_process):
            if time.monotonic() + START_S / 2 + members[0].lasts_s > self.deadline:
                self.left_out += [run.name for run in members]
                continue
            try:
                self._measure_group(members)
            except Exception as error:  # time on such a machine is dear: the next server may do better
                traceback.print_exception(error)
                self.failures.append(f"{members[0].slots} slots: {type(error).__name__}: {error}")

    def _measure_group(self, members: Sequence[Run]) -> None:
        is_here = members[0].is_timed or self.in_process
        wanted = self.options | {"max_loras_per_batch": members[0].slots} | dict(members[0].options)
        options = {name: value for name, value in wanted.items() if value is not None}
        asked = Asked(self.folder, options, self.shape.config["vocab_size"], members[0].adapters, members[0].name)
        server: Server = InProcessServer(asked) if is_here else HttpServer(asked, self.out)
        try:
            self._warm_up(server, members[0])
            for run in members:
                self._measure_one(server, run, options)
        finally:
            server.stop()

    def _warm_up(self, server: Server, first: Run) -> None:
        facts = {"via": server.via, "slots": first.slots, "weights": self.weights, "start_s": round(server.start_s, 1)}
        facts |= {"adapters": first.adapters, "first": first.name}
        say(f"ready after {server.start_s:.1f} s ({server.via}, {first.slots} slots, {first.adapters} adapters)")
        server.run(self.shape.fit(warm_up(first.adapters)), self.seed, WARM_UP_LIMIT_S)
        time.sleep(self.rest_s)
        write_result(
            self.out, f"start-{server.via}-{first.name}", {**self.facts, **facts, "peak_rss_gb": server.peak_rss_gb()}
        )

    def _measure_one(self, server: Server, run: Run, options: dict[str, Any]) -> None:
        if time.monotonic() + run.lasts_s > self.deadline:
            self.left_out.append(run.name)
            return
        scenario, begun_at = self.shape.fit(run.scenario), time.monotonic()
        outcome = server.run(scenario, self.seed, run.lasts_s * PATIENCE + SPARE_S)
        taken_s = time.monotonic() - begun_at
        result = {
            **self.facts, "run": run.name, "via": server.via, "seed": self.seed, "options": options,
            "scenario": describe(scenario), "taken_s": round(taken_s, 1), "problems": outcome.problems,
            "summary": summarise(outcome.recorder),
        }  # fmt: skip
        if isinstance(server, InProcessServer):
            self._keep_steps(server, run, result)
        if any(client.cancel_share for client in scenario.clients):
            result["afterwards"] = summarise(server.run(probe(), self.seed, PROBE_LIMIT_S).recorder)
        write_result(self.out / "runs", run.name, result)
        summary = result["summary"]
        say(
            f"{run.name}: {taken_s:.1f} s, {summary['output_tokens_per_s']:,.0f} tok/s, TTFT median "
            f"{summary['ttft_s']['median'] * 1e3:.1f} ms, P99 {summary['ttft_s']['p99'] * 1e3:.1f} ms, ITL median "
            f"{summary['itl_s']['median'] * 1e3:.2f} ms, {summary['failed']:.0f} failed"
        )

    def _keep_steps(self, server: InProcessServer, run: Run, result: dict[str, Any]) -> None:
        steps = server.timed.steps
        if run.name == "loads":
            result["beside_loads"] = beside_loads(steps, server.events)
        if run.name.startswith("steps"):
            path = self.out / "step-timings.json"
            earlier = json.loads(path.read_text()) if path.exists() else []
            path.write_text(json.dumps(earlier + [step.timing for step in steps if step.seconds > 0.0]))


def say(line: str) -> None:
    print(line, flush=True)


def prepare(folder: Path, shape: Shape, has_weights: bool) -> dict[str, Any]:
    """Make what is missing, in a process that gives the device back; returns what measures, in words."""
    if not is_made(folder, has_weights):
        make = [sys.executable, "-m", "benchmarks.h200.assets", str(folder), shape.name]
        subprocess.run(tied([*make, *([] if has_weights else ["--dummy"])]), check=True)
    machine = (folder / "machine").read_text("utf-8")
    return {"machine": machine, "date": date.today().isoformat(), "shape": shape.name}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="runs whose names begin so, with commas: tail,closed-six,osl-64")
    parser.add_argument("--requests", type=int, help="of each client, instead of what the runs say")
    parser.add_argument("--in-process", action="store_true", help="no HTTP: the engine in this process")
    parser.add_argument("--out", type=Path, default=Path("h200-results"))
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no run that would not end within these")
    parser.add_argument("--rest", type=float, default=0.0, help="seconds that a server is idle after its warm-up")
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--weights", choices=("disk", "dummy"), default="disk", help="'dummy': drawn at every start")
    parser.add_argument("--folder", type=Path, help="where model and adapters are made, and found again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="of every server, as JSON")
    parser.add_argument("--list", action="store_true", help="print the runs and what they last, and end")
    return parser.parse_args(arguments)


def server_options(shape: Shape, weights: str, given: Sequence[str]) -> dict[str, Any]:
    """What every server is started with; `given` goes before."""
    options: dict[str, Any] = {"enable_prefix_caching": False, "max_lora_rank": RANK}
    if weights == "dummy":
        options["load_format"] = "dummy"
    if shape.name == "tiny":
        options |= {"device": "cpu", "kv_blocks": 2048, "max_running_requests": 64}
    for entry in given:
        name, _, value = entry.partition("=")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    begun_at = time.monotonic()
    deadline = begun_at + given.minutes * 60
    shape = SHAPES[given.shape]
    try:
        wanted = choose(given.only)
        if given.requests:
            wanted = [lengthened(run, given.requests) for run in wanted]
    except RotaError as error:
        print(f"benchmarks.h200: {error}", file=sys.stderr)
        return 2
    if given.list:
        for members in group(within(wanted, given.minutes * 60, given.in_process), given.in_process):
            say(f"{members[0].slots} slots: " + ", ".join(f"{run.name} ({run.lasts_s:.0f} s)" for run in members))
        return 0
    folder = given.folder or Path(tempfile.gettempdir()) / f"rota-{shape.name}"
    facts = prepare(folder, shape, given.weights == "disk")
    say(f"model and adapters in {folder}, after {time.monotonic() - begun_at:.0f} s")
    runs = within(wanted, deadline - time.monotonic(), given.in_process)
    session = Session(
        folder=folder,
        out=given.out,
        shape=shape,
        options=server_options(shape, given.weights, given.set),
        weights=given.weights,
        seed=given.seed,
        in_process=given.in_process,
        deadline=deadline,
        rest_s=given.rest,
        facts={**facts, "command": " ".join(["python -m benchmarks.h200", *sys.argv[1:]])},
    )
    given.out.mkdir(parents=True, exist_ok=True)
    session.measure(runs)
    text = report(given.out)
    (given.out / "report.md").write_text(text + "\n", "utf-8")
    say("\n" + text)
    if left_out := [*session.left_out, *(run.name for run in wanted if run not in runs)]:
        say(f"Left out for want of time: {', '.join(left_out)}.")
    for failure in session.failures:
        say(f"Failed: {failure}")
    return 1 if session.failures else 0


if __name__ == "__main__":
    sys.exit(main())
