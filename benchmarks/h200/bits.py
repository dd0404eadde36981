"""Measures steps in sixteen and in eight bits, with the engine in this process.

    python -m benchmarks.h200.bits [--kinds bf16,fp8,fp8+kv] [--only steps,prompts,loop,profile] [--out FILE] …

    steps    decode steps of 1, 64 and 384 rows behind 560 tokens, base and with adapters, also 64 different ones
    prompts  8 × 512 tokens, tokens a second
    loop     twice as many requests as rows, all known at the start: how long which steps take, and how long the host
             is at launching them; once as the engine does it, and once with large steps launched kernel by kernel
    profile  what kernels take, in decode steps and in steps with a prompt among 384 decodes

Each kind has an engine of its own; FILE has what each part found.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rota.core.adapter import Adapter
from rota.core.config import CacheConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from rota.core.ids import BASE, AdapterId
from rota.core.plan import StepPlan
from rota.engine.step.frames import PROMPT_TOKENS, StepFrame
from rota.engine.step.graphs import StepGraphs

from .__main__ import say
from .assets import make_adapter, make_model
from .kinds import KINDS
from .shapes import RANK, SHAPES, Shape
from .stage import Stage, milliseconds
from .timed import Step

FEW, SOME = 6, 16  # adapters
ROWS = 384
PROMPT, ANSWER = 560, 60
MOST_KERNELS = 16


class Bench:
    """An engine of one kind, with its adapters in their slots and all graphs captured."""

    def __init__(self, folder: Path, shape: Shape, kind: str, slots: int) -> None:
        bits = KINDS[kind]
        self.shape = shape
        self.rows = max(1, ROWS // shape.fewer)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.stage = Stage(
            EngineConfig(
                model=ModelConfig(model_path=str(folder / "model"), load_format="dummy", device=device, **bits.model),
                cache=CacheConfig(**bits.cache),
                scheduler=SchedulerConfig(max_running_requests=self.rows, enable_prefix_caching=False),
                lora=LoraConfig(max_loras_per_batch=slots, max_lora_rank=RANK),
                quiet=True,
            )
        )
        while self.stage.engine.work_while_idle():
            pass
        known = [
            Adapter(adapter_id=AdapterId(number), name=f"a{number}", path=str(folder / "a"))
            for number in range(1, slots + 1)
        ]
        self.stage.add(known)
        self.ids = [adapter.adapter_id for adapter in known]
        self.serve(2 * slots, 100, 8, [BASE, *self.ids])

    def serve(self, count: int, prompt: int, output: int, who: Sequence[AdapterId]) -> list[float]:
        """Smaller where the shape is."""
        count, prompt = max(1, min(count, 2 * self.rows)), max(1, prompt // self.shape.shorter)
        return self.stage.serve(count, prompt, max(min(8, output), output // self.shape.shorter), who)

    def close(self) -> None:
        self.stage.engine.close()
        del self.stage
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def steps(bench: Bench) -> dict[str, Any]:
    groups: dict[str, tuple[int, list[AdapterId]]] = {
        "1 base": (1, [BASE]),
        "1 adapter": (1, bench.ids[:1]),
        "64 base": (64, [BASE]),
        "64 six": (64, bench.ids[:FEW]),
        f"64, {len(bench.ids)} adapters": (64, bench.ids),
        "384 base": (384, [BASE]),
        "384, 16 adapters": (384, bench.ids[:SOME]),
    }
    found = {label: bench.serve(min(count, bench.rows), PROMPT, ANSWER, who) for label, (count, who) in groups.items()}
    return {label: milliseconds(seconds) for label, seconds in found.items() if seconds}


def prompts(bench: Bench) -> dict[str, Any]:
    def best(who: Sequence[AdapterId]) -> float:
        rates = []
        for _ in range(3):
            begun_at = time.monotonic()
            bench.serve(8, 512, 1, who)
            computed = sum(step.prompt_tokens for step in bench.stage.device.steps)
            rates.append(computed / (bench.stage.device.steps[-1].ended_at - begun_at))
        return round(max(rates))

    return {"base": best([BASE]), "six": best(bench.ids[:FEW])}


def loop(bench: Bench) -> dict[str, Any]:
    found = {}
    for label, who in (("base", [BASE]), ("16", bench.ids[:SOME])):
        for way, launching in (("as it is", None), ("kernel by kernel", PROMPT_TOKENS[-1])):
            with at_most(launching):
                begun_at = time.monotonic()
                bench.serve(2 * bench.rows, 512, 192, who)
                wall_s = time.monotonic() - begun_at
            found[f"{label}, {way}"] = {"seconds": round(wall_s, 2), **by_size(bench.stage.device.steps)}
    return found


@contextmanager
def at_most(tokens: int | None) -> Any:
    """Steps with more prompt tokens than that go without a graph."""
    usual: Callable[..., StepFrame | None] = StepGraphs.frame_for

    def frame_for(self: StepGraphs, plan: StepPlan, has_adapters: bool) -> StepFrame | None:
        is_large = tokens is not None and sum(chunk.length for chunk in plan.chunks) > tokens
        return None if is_large else usual(self, plan, has_adapters)

    StepGraphs.frame_for = frame_for  # type: ignore[method-assign]
    try:
        yield
    finally:
        StepGraphs.frame_for = usual  # type: ignore[method-assign]


def by_size(every: Sequence[Step]) -> dict[str, Any]:
    """Steps that decode alone, and others by the tokens of their prompts."""
    sizes: dict[str, list[Step]] = {}
    for step in every:
        sizes.setdefault(f"{-(-step.prompt_tokens // 512) * 512} prompt tokens", []).append(step)
    return {
        size: {
            "steps": len(some),
            "seconds": round(sum(step.seconds for step in some), 3),
            "step_ms": milliseconds([step.seconds for step in some]),
            "launch_ms": milliseconds([step.submit_s for step in some]),
            "decodes": round(statistics.mean(step.decodes for step in some)),
        }
        for size, some in sorted(sizes.items())
    }


def profile(bench: Bench) -> dict[str, Any]:
    """Milliseconds and launches of the kernels that take longest, of all steps of a loop."""
    if not torch.cuda.is_available():
        return {}
    found = {}
    few, different, every = bench.ids[:FEW], bench.ids, bench.rows
    for label, count, prompt, output, who in (
        ("64 base, 30 steps", 64, PROMPT, 30, [BASE]),
        ("64 six, 30 steps", 64, PROMPT, 30, few),
        (f"64 of {len(different)}, 30 steps", 64, PROMPT, 30, different),
        ("384 base, prompts and 30 steps", every, 512, 30, [BASE]),
    ):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            bench.serve(count, prompt, output, who)
        rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)[:MOST_KERNELS]
        found[label] = {row.key[:80]: [round(row.self_device_time_total / 1e3, 2), row.count] for row in rows}
    return found


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "steps": steps, "prompts": prompts, "loop": loop, "profile": profile,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--slots", type=int, default=SOME, help="as many adapters are known; 64 for different ones")
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--out", type=Path, default=Path("h200-bits.json"))
    asked = parser.parse_args(arguments)
    shape, found = SHAPES[asked.shape], dict[str, Any]()
    with tempfile.TemporaryDirectory() as scratch:
        make_adapter(Path(scratch) / "a", make_model(Path(scratch) / "model", shape.config), RANK)
        for kind in asked.kinds.split(","):
            bench = Bench(Path(scratch), shape, kind, asked.slots)
            found[kind] = {"start_s": round(bench.stage.start_s, 1)}
            for part in asked.only.split(","):
                found[kind][part] = PARTS[part](bench)
                say(f"{kind} {part}: {json.dumps(found[kind][part])}")
                asked.out.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
            bench.close()


if __name__ == "__main__":
    main()
