"""Profiles a step of the real loop: where each microsecond goes on the device and on the host, with the floor beside.

    python benchmarks/profile_step.py [--prefill] [--batches 1 16 64] [--kind fp8+kv] [--adapters 16] [--unchained] …

The loop runs at depth 2 over a Llama-8B shape with random weights, first unwatched and then under torch.profiler.
Watching slows the host and spreads kernels a little, so the device's idle share is told twice: within the trace, and
as what the kernels leave of the unwatched step. A chained kernel's time holds its wait for the one before, and the sum
is more than the step; `--unchained` tells what each takes by itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from h200.assets import make_adapter, make_model
from h200.floors import BYTES_PER_S, FLOPS, Load, floor_bytes, floor_flops
from h200.kinds import KINDS, Kind
from h200.report import number, table
from h200.shapes import RANK, SHAPES, Shape
from h200.stage import Stage, steady
from h200.timed import Step
from h200.trace import Profile, profile, read_kernels
from h200.watch import SETTLING, Clocked, Marked, Watch

from rota.core.adapter import Adapter
from rota.core.config import CacheConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from rota.core.ids import BASE, AdapterId
from rota.engine import programmatic_launch
from rota.engine.engine import Engine

# Sequences that run, at least.
ROWS = 64
# Tokens of a step of prompts before decodes.
BUDGET = 4096


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of step: so many sequences that decode, or so many prompts, of a length; with adapters or without."""

    name: str
    count: int
    length: int
    adapters: int
    is_prefill: bool = False


def cases(is_prefill: bool, batches: Sequence[int], shape: Shape, adapters: int) -> list[Case]:
    if is_prefill:
        sizes = [(1, 2048 // shape.shorter), (8, 512 // shape.shorter)]
        return [Case(f"prompts {n} × {length}", n, length, a, True) for n, length in sizes for a in (0, adapters)]
    length = 560 // shape.shorter
    return [Case(f"decode {n} × {length}", n, length, a) for n in batches for a in (0, adapters)]


def measure(
    case: Case, config: EngineConfig, engine: Engine, adapters: Sequence[Adapter], steps: int, kind: Kind
) -> dict[str, Any]:
    """The same load twice on one stage, unwatched and watched."""
    stage = Stage(config, engine)
    stage.device.device = Marked(engine)
    stage.add(adapters)
    users = [adapter.adapter_id for adapter in adapters][: case.adapters] or [AdapterId(BASE)]
    # The first to decode do so until the last one does.
    requests, output = case.count, steps + 3 * SETTLING + -(-case.count * case.length // BUDGET)
    if case.is_prefill:  # one step for every `count` of them
        requests, output = case.count * (steps + 2 * SETTLING), 1
    stage.serve(min(requests, 2 * case.count), case.length, 4, users)  # adapters are in their slots, kernels compiled
    clocked = stage.scheduler = Clocked(stage.scheduler)  # type: ignore[assignment]
    stage.serve(requests, case.length, output, users)
    plain = matching(stage.device.steps, case)
    host = {
        "plan": statistics.median(clocked.plan_s),
        "submit": statistics.median(step.submit_s for step in plain),
        "wait": statistics.median(step.wait_s for step in plain),
        "commit": statistics.median(clocked.commit_s),
    }
    watch = Watch(*((0, case.count) if case.is_prefill else (case.count, 0)), steps)
    stage.device.on_submit = watch.note
    stage.serve(requests, case.length, output, users)
    watch.stop()
    assert watch.trace is not None, "too few steps to profile"
    found = profile(read_kernels(watch.trace))
    return result(case, engine, plain, host, found, kind)


def matching(steps: Sequence[Step], case: Case) -> list[Step]:
    """The steps of the case's kind, less those in which everything settles."""
    if not case.is_prefill:
        return steady(steps, case.count)[SETTLING // 2 :]
    return [step for step in steps if step.prompt_tokens == case.count * case.length][SETTLING // 2 :]


def result(
    case: Case, engine: Engine, plain: Sequence[Step], host: dict[str, float], found: Profile, kind: Kind
) -> dict[str, Any]:
    spec = engine.spec
    step_us = statistics.median(step.seconds for step in plain) * 1e6
    middle = plain[len(plain) // 2]
    load = Load(middle.decodes + middle.prompt_tokens, case.count, middle.context_tokens, middle.adapters, RANK)
    floors = {family: moved / BYTES_PER_S * 1e6 for family, moved in floor_bytes(spec, load, kind).items()}
    told: dict[str, Any] = {
        "case": case.name,
        "adapters": middle.adapters,
        "step_us": step_us,
        "floor_us": sum(floors.values()),
        "idle_share": max(0.0, 1.0 - found.busy_us / step_us),
        "idle_share_in_trace": 1.0 - found.busy_us / found.step_us,
        "launches_per_layer": found.kernels / spec.layers,
        "trace": asdict(found),
        "floors_us": floors,
        "host_us": {phase: seconds * 1e6 for phase, seconds in host.items()},
    }
    if case.is_prefill:
        flops = floor_flops(spec, load, [case.length] * case.count)
        told |= {"tokens_per_s": load.tokens / step_us * 1e6, "flops_share": flops / (step_us * 1e-6) / FLOPS}
    return told


def report(results: Sequence[dict[str, Any]]) -> str:
    """A line a case, then a table of families for each."""
    heads = ("step", "adapters", "µs", "floor", "idle", "between steps", "idle in trace", "launches a layer")
    rows = [
        [
            one["case"], str(one["adapters"]), number(one["step_us"]), number(one["floor_us"]),
            f"{one['idle_share']:.1%}", f"{one['trace']['between_us'] / one['step_us']:.1%}",
            f"{one['idle_share_in_trace']:.1%}", number(one["launches_per_layer"]),
            *[number(one["host_us"][phase]) for phase in ("plan", "submit", "wait", "commit")],
            f"{one['flops_share']:.0%}" if "flops_share" in one else "",
        ]
        for one in results
    ]  # fmt: skip
    host = ("host: plan", "submit", "wait", "commit")
    lines = table((*heads, *host, f"of {FLOPS / 1e12:.0f} TFLOP/s"), rows)
    for one in results:
        families = one["trace"]["families"]
        lines += ["", f"{one['case']}, {one['adapters']} adapters:", ""]
        lines += table(
            ("family", "µs a step", "floor", "launches"),
            [
                [family, number(spent), number(one["floors_us"].get(family)), number(launches)]
                for family, (spent, launches) in sorted(families.items(), key=lambda item: -item[1][0])
            ],
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", action="store_true", help="steps of prompts: 2048 tokens, and 8 of 512")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64], help="sequences that decode")
    parser.add_argument("--kind", choices=KINDS, default="bf16", help="bits of the weights, and of the KV")
    parser.add_argument("--adapters", type=int, default=6, help="of the steps with adapters; as many slots")
    parser.add_argument("--unchained", action="store_true", help="no kernel begins before the one before has ended")
    parser.add_argument("--steps", type=int, default=40, help="steps in a trace")
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--out", type=Path, help="write profile.json and profile.md here")
    given = parser.parse_args(arguments)
    shape = SHAPES[given.shape]
    programmatic_launch.IS_PROGRAMMATIC = not given.unchained
    with tempfile.TemporaryDirectory() as scratch:
        wanted = cases(given.prefill, given.batches, shape, given.adapters)
        results = measure_all(Path(scratch), shape, wanted, given.steps, KINDS[given.kind])
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    facts = {"machine": name, "torch": torch.__version__, "date": date.today().isoformat(), "shape": shape.name}
    facts |= {"kind": given.kind, "is_chained": not given.unchained}
    text = report(results)
    print(text)
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        way = "-unchained" if given.unchained else ""
        stem = given.out / f"profile-{'prefill' if given.prefill else 'decode'}-{given.kind}{way}"
        stem.with_suffix(".json").write_text(json.dumps({**facts, "cases": results}, indent=1) + "\n", "utf-8")
        stem.with_suffix(".md").write_text(text + "\n", "utf-8")


def measure_all(folder: Path, shape: Shape, wanted: Sequence[Case], steps: int, kind: Kind) -> list[dict[str, Any]]:
    """One engine for all; each case has books and adapter ids of its own."""
    model = make_model(folder / "model", shape.config)
    make_adapter(folder / "adapter", model, RANK)
    engine: Engine | None = None
    results, slots = [], max(case.adapters for case in wanted)
    for index, case in enumerate(wanted):
        budget = case.count * case.length if case.is_prefill else BUDGET
        config = EngineConfig(
            model=ModelConfig(model_path=str(model), load_format="dummy", **kind.model),
            cache=CacheConfig(kv_blocks=1024 if shape.name == "tiny" else None, **kind.cache),
            scheduler=SchedulerConfig(
                max_running_requests=max(ROWS, *(case.count for case in wanted)),
                chunked_prefill_size=budget,
                enable_prefix_caching=False,
            ),
            lora=LoraConfig(max_loras_per_batch=slots, max_lora_rank=RANK),
            quiet=True,
        )
        engine = engine or Stage(config).engine
        first = 1 + 100 * index
        adapters = [
            Adapter(adapter_id=AdapterId(n), name=f"a{n}", path=str(folder / "adapter"))
            for n in range(first, first + slots)
        ]
        results.append(measure(case, config, engine, adapters, steps, kind))
        print(f"{case.name}, {case.adapters} adapters: {results[-1]['step_us']:,.0f} µs", flush=True)
    return results


if __name__ == "__main__":
    main()
