"""Fits a cost model to steps on this GPU, simulates what was measured, and says how far apart the two are.

    python -m benchmarks.h200.fit --out FOLDER [--weights disk]     measures, fits, compares
    python -m benchmarks.h200.fit --out FOLDER --http 1000          measures over HTTP, fits and compares again
    python -m benchmarks.h200.fit --out FOLDER --server SERVER      the steps of another server
    python -m benchmarks.h200.fit --again FOLDER                    fits and compares what is in the folder

1. A server with 16 slots computes steps of many shapes. Every step is timed by the device's own clock.
2. A server with 3 slots answers `tail-ttft` at 4/s and 10/s.
3. With `--http N` a server with 3 slots answers the same over HTTP, and then N requests at each rate.
4. The cost model is fitted to the steps of 1. The runs of 2 and 3 judge it: their steps, and the run as a whole.

SERVER is what `benchmarks.azure --write-server` made: the ranks of its adapters differ. 1 and 2 take three minutes on
an H200, 3 takes eight with `--http 1000`. `--shape tiny` tries it on a CPU. FOLDER keeps the model, the steps, the
results and the report.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rota.core.config import SchedulerConfig
from rota.engine.step.frames import PromptRoom, decode_frames, mixed_frames
from rota.sim.calibrate import MeasuredStep, calibrate, errors, write_cost
from rota.sim.cost import Graphs, LinearCost, read_cost
from rota.workload.scenario import Client, Scenario

from .__main__ import PATIENCE, SPARE_S, WARM_UP_LIMIT_S, prepare, say, server_options
from .fidelity import LIKE, compare
from .in_process import InProcessServer
from .over_http import HttpServer
from .peers import TAIL_FIGURES
from .report import number, table
from .results import Result, describe, read_results, summarise, write_result
from .runs import FEW, Run, choose, lengthened, warm_up
from .server import Asked, Server
from .shapes import ADAPTERS, SHAPES, Shape
from .traced import Traced, TracedStep, columns, steps_of

KNOTS = (
    1, 8, 16, 32, 64, 96, 128, 144, 160, 192, 224, 256, 288, 320, 384, 448, 512, 576, 640, 768, 896, 1024, 1152, 1280,
    2304,
)  # fmt: skip
FIGURES = (*TAIL_FIGURES, ("gap_s", "p99"), ("gap_s", "max"))
KV_BLOCKS = 12_288
SWEEP, TAILS, OVER_HTTP = "sweep", ("tail-3-4", "tail-3-10"), "http"


def sweep() -> list[Scenario]:
    """Few and many decodes beside prompts of all lengths, with no adapter, one, three, six and sixteen."""

    def scenario(requests: int, concurrency: int, adapters: int, prompts: tuple[int, int], longest: int) -> Scenario:
        client = Client(
            requests=requests,
            concurrency=concurrency,
            prompt_tokens=prompts,
            output_tokens=(8, longest),
            adapters=adapters,
            base_share=0.1 if adapters else 0.0,
        )
        return Scenario(name=f"sweep-{concurrency}-{adapters}-{prompts[1]}", slots=ADAPTERS, clients=(client,))

    return [
        scenario(40, 1, 1, (1, 512), 24),
        scenario(60, 6, 3, (1, 512), 64),
        scenario(80, 12, 6, (1, 512), 96),
        scenario(80, 12, 0, (1, 1000), 64),
        scenario(120, 24, 3, (1, 512), 96),
        scenario(120, 48, 6, (1, 768), 128),
        scenario(160, 96, 16, (1, 512), 96),
        scenario(160, 96, 0, (1, 384), 64),
        scenario(320, 200, 16, (1, 256), 96),
        scenario(60, 24, 6, (512, 2048), 48),
        scenario(40, 4, 1, (512, 2048), 24),
        scenario(40, 48, 0, (512, 2048), 48),
    ]


@dataclass(slots=True)
class Session:
    """One call of this script that measures."""

    folder: Path  # of assets
    out: Path
    shape: Shape
    options: dict[str, Any]
    seed: int
    rest_s: float
    facts: dict[str, Any]

    def measure(self) -> None:
        self.measure_steps(self._asked(ADAPTERS))
        with self._in_process(self._asked(FEW)) as server:
            for run in choose(",".join(TAILS)):
                result = self._tail(server, run)
                self._keep(server, run.name, {"copies": _spread_ms(server.timed.copy_s)})
                write_result(self.out / "runs", run.name, result)

    def measure_over_http(self, requests: int) -> None:
        server = HttpServer(self._asked(FEW), self.out)
        try:
            server.run(self.shape.fit(warm_up()), self.seed, WARM_UP_LIMIT_S)
            time.sleep(self.rest_s)
            for run in choose(",".join(TAILS)):
                write_result(self.out / "runs", f"{run.name}-{OVER_HTTP}", self._tail(server, run))
                longer = self._tail(server, lengthened(run, requests))
                write_result(self.out / "runs", f"{run.name}-{OVER_HTTP}-{requests}", longer)
        finally:
            server.stop()

    def measure_steps(self, asked: Asked) -> None:
        with self._in_process(asked) as server:
            for scenario in sweep():
                server.run(self.shape.fit(scenario), self.seed, WARM_UP_LIMIT_S)
                self._keep(server, scenario.name, {})
                say(f"{scenario.name}: {len(server.timed.steps):,} steps")

    def _asked(self, slots: int) -> Asked:
        options = {"kv_blocks": KV_BLOCKS} | self.options | {"max_loras_per_batch": slots}
        return Asked(self.folder, options, self.shape.config["vocab_size"])

    def _in_process(self, asked: Asked) -> _Started:
        server = InProcessServer(asked, Traced)
        say(f"ready after {server.start_s:.1f} s")
        server.run(self.shape.fit(warm_up()), self.seed, WARM_UP_LIMIT_S)
        time.sleep(self.rest_s)
        return _Started(server)

    def _tail(self, server: Server, run: Run) -> Result:
        scenario = self.shape.fit(run.scenario)
        outcome = server.run(scenario, self.seed, run.lasts_s * PATIENCE + SPARE_S)
        summary = summarise(outcome.recorder)
        options = self.options | {"max_loras_per_batch": FEW}
        say(f"{run.name}, {server.via}: TTFT median {summary['ttft_s']['median'] * 1e3:.1f} ms, "
            f"E2E mean {summary['e2e_s']['mean']:.2f} s, {summary['failed']:.0f} failed")  # fmt: skip
        return {
            **self.facts, "run": run.name, "via": server.via, "seed": self.seed, "options": options,
            "scenario": describe(scenario), "problems": outcome.problems, "summary": summary,
        }  # fmt: skip

    def _keep(self, server: InProcessServer, name: str, more: dict[str, Any]) -> None:
        traced = server.timed
        assert isinstance(traced, Traced)
        folder = self.out / "steps"
        folder.mkdir(parents=True, exist_ok=True)
        kept = {**self.facts, **more, "steps": columns(traced.trace())}
        (folder / f"{name}.json").write_text(json.dumps(kept) + "\n", "utf-8")


@dataclass(slots=True)
class _Started:
    """A server that stops at the end of a `with`."""

    server: InProcessServer

    def __enter__(self) -> InProcessServer:
        return self.server

    def __exit__(self, *_: object) -> None:
        self.server.stop()


def server_of(folder: Path, shape: Shape) -> Asked:
    """What `rota serve --config FOLDER/serve.toml` would serve."""
    options = tomllib.loads((folder / "serve.toml").read_text("utf-8"))
    given = {name: Path(path) for name, path in (entry.split("=", 1) for entry in options.pop("lora_paths"))}
    return Asked(folder, options, shape.config["vocab_size"], given=given)


def analyse(folder: Path) -> str:
    """Markdown, from the steps and results of a folder; also writes the fitted model there."""
    traces = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted((folder / "steps").glob("*.json"))}
    steps = {name: steps_of(one["steps"]) for name, one in traces.items()}
    results = read_results(folder)
    like = replace(read_cost(LIKE), graphs=graphs_of(SchedulerConfig()))
    if copies := [traces[name]["copies"]["median"] / 1e3 for name in TAILS if traces.get(name, {}).get("copies")]:
        like = replace(like, load_s=statistics.mean(copies))
    swept = [step for name, these in steps.items() if name.startswith(SWEEP) for step in these]
    fit = calibrate(measured(swept, like), like, LIKE)
    cost = replace(fit.cost, front_s=front_s(results))
    write_cost(replace(fit, cost=cost), folder / f"{LIKE}.toml", folder / "steps")
    (folder / "step-timings.json").write_text(json.dumps([asdict(step) for step in measured(swept, like)]), "utf-8")
    lines = [f"{fit}; load {cost.load_s * 1e3:.2f} ms, front end {cost.front_s * 1e3:.2f} ms.", ""]
    lines += ["## Single steps, by the device's clock", "", *_single(cost, steps), ""]
    lines += ["## What the model does not hold (ms)", "", *_unmodelled(steps), ""]
    lines += ["## Whole runs: real, simulated, error (ms)", "", *_whole(cost, results), ""]
    return "\n".join(lines)


def graphs_of(config: SchedulerConfig) -> Graphs:
    """The sizes that an engine captures; the curve is still flat."""
    rows, mixed = (
        config.max_running_requests,
        mixed_frames(config.max_running_requests, PromptRoom(config.chunked_prefill_size)),
    )
    return Graphs(
        decodes=tuple(sorted({frame.decodes for frame in decode_frames(rows)})),
        mixed_decodes=tuple(sorted({frame.decodes for frame in mixed})),
        prompt_tokens=tuple(sorted({frame.prompt_tokens for frame in mixed})),
        knots=KNOTS,
        knots_s=(0.0,) * len(KNOTS),
    )


def measured(steps: Sequence[TracedStep], like: LinearCost) -> list[MeasuredStep]:
    """Steps that waited for no copy; what `prefix_pair_s` says is taken off, since that number is not fitted."""
    return [
        MeasuredStep(
            decodes=step.decodes,
            prompt_tokens=step.prompt_tokens,
            context_tokens=step.context_tokens,
            adapters=step.adapters,
            seconds=step.step_s - like.prefix_pair_s * step.pairs,
        )
        for step in steps
        if not step.copies and step.step_s > like.prefix_pair_s * step.pairs
    ]


def front_s(results: Mapping[str, Result]) -> float:
    """What HTTP and the processes around the loop add to a first token: the median with them, less that without."""
    added = [
        results[f"{run}-{OVER_HTTP}"]["summary"]["ttft_s"]["median"] - results[run]["summary"]["ttft_s"]["median"]
        for run in TAILS
        if run in results and f"{run}-{OVER_HTTP}" in results
    ]
    return max(0.0, statistics.mean(added)) if added else 0.0


def _single(cost: LinearCost, steps: Mapping[str, Sequence[TracedStep]]) -> list[str]:
    rows = []
    for name, these in steps.items():
        kinds = {
            "all": these,
            "decodes only": [step for step in these if not step.prompt_tokens],
            "with prompts": [step for step in these if step.prompt_tokens],
            "without a graph": [step for step in these if not _has_graph(cost, step)],
        }
        for kind, some in kinds.items():
            if judged := measured(some, cost):
                off = errors(cost, judged)
                expected = sum(
                    cost.seconds(one.decodes, one.prompt_tokens, one.context_tokens, one.adapters) for one in judged
                )
                bias = expected / sum(one.seconds for one in judged) - 1.0
                cells = [f"{off['median_error']:.1%}", f"{off['p95_error']:.1%}", f"{bias:+.1%}"]
                rows.append([name, kind, f"{len(judged):,}", *cells])
    return table(("run", "steps", "number", "error: median", "P95", "of the sum"), rows)


def _has_graph(cost: LinearCost, step: TracedStep) -> bool:
    return cost.graphs is None or cost.graphs.padded(step.decodes, step.prompt_tokens)[1]


def _unmodelled(steps: Mapping[str, Sequence[TracedStep]]) -> list[str]:
    """Time that is in no step: the device idle although a step was in flight, and tokens that wait for the host."""
    rows = []
    for name, these in steps.items():
        bubbles = [step.idle_s for step in these if step.queued]
        total_s = sum(step.step_s for step in these)
        told = _spread_ms([step.told_s for step in these])
        waits = _spread_ms([step.step_s for step in these if step.copies])
        submits = _spread_ms([step.submit_s for step in these])
        rows.append(
            [name, f"{sum(bubbles) / total_s:.2%}", *map(_cell, (_spread_ms(bubbles), submits, told, waits)),
             f"{sum(bool(step.copies) for step in these):,}"]
        )  # fmt: skip
    heads = (
        "run",
        "idle between steps, share",
        "idle",
        "submit",
        "told after",
        "steps that may wait for a copy",
        "these",
    )
    return table(heads, rows)


def _whole(cost: LinearCost, results: Mapping[str, Result]) -> list[str]:
    rows = []
    for name, result in results.items():
        served = cost if result["via"] == "http" else replace(cost, front_s=0.0)
        found = compare(served, {name: result}, FIGURES)[name]
        for what, pair in found.items():
            rows.append([name, what, number(pair["real"]), number(pair["simulated"]), f"{pair['error']:+.1%}"])
    return table(("run", "figure", "real", "simulated", "error"), rows)


def _spread_ms(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    ordered = sorted(seconds)
    picks = {"median": statistics.median(ordered), "p95": ordered[int(len(ordered) * 0.95)], "max": ordered[-1]}
    return {name: round(value * 1e3, 4) for name, value in picks.items()}


def _cell(spread: Mapping[str, float]) -> str:
    return " / ".join(number(value) for value in spread.values()) or "–"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("h200-fit"))
    parser.add_argument("--again", type=Path, metavar="FOLDER", help="measure nothing: fit what is there")
    parser.add_argument("--http", type=int, default=0, metavar="N", help="over HTTP, with N more requests at each rate")
    parser.add_argument("--server", type=Path, help="only the steps of this server, of benchmarks.azure")
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--weights", choices=("disk", "dummy"), default="dummy", help="'dummy': drawn at every start")
    parser.add_argument("--folder", type=Path, help="where model and adapters are made, and found again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rest", type=float, default=20.0, help="seconds after a warm-up, for graphs (20)")
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="of every server, as JSON")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    given = parse(words)
    out = given.again or given.out
    if not given.again:
        shape, begun_at = SHAPES[given.shape], time.monotonic()
        folder = given.folder or Path(tempfile.gettempdir()) / f"rota-{shape.name}"
        facts = prepare(folder, shape, given.weights == "disk")
        say(f"model and adapters in {folder}, after {time.monotonic() - begun_at:.0f} s")
        out.mkdir(parents=True, exist_ok=True)
        session = Session(
            folder=folder,
            out=out,
            shape=shape,
            options=server_options(shape, given.weights, given.set),
            seed=given.seed,
            rest_s=given.rest,
            facts={**facts, "command": " ".join(["python -m benchmarks.h200.fit", *words])},
        )
        if given.server:
            session.measure_steps(server_of(given.server, shape))
        elif given.http:
            session.measure_over_http(given.http)
        else:
            session.measure()
        say(f"measured, after {time.monotonic() - begun_at:.0f} s")
    if not (out / "steps").exists():
        return 0
    text = analyse(out)
    (out / "report.md").write_text(text + "\n", "utf-8")
    say(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
