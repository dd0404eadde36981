"""Measures steps of a Llama-8B shape on a GPU, through the real loop: base, many adapters, prompts, loads meanwhile.

    python benchmarks/gpu_step.py [--output FILE] [--timings FILE]

Weights and adapters are random. Times are between the tokens of consecutive steps, so everything counts: planning,
launching, reading back. `--timings` keeps every step for `rota simulate --calibrate`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rota.core.adapter import Adapter
from rota.core.config import CacheConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from rota.core.events import AdapterAdded, AdapterRefused, Event, Finished, SlotChanged, SlotState
from rota.core.ids import BASE, AdapterId, RequestId
from rota.core.plan import StepPlan, StepResult
from rota.core.request import Request, SamplingParams
from rota.engine.engine import Engine, build_engine
from rota.engine.lora.sites import module_name, site_shapes
from rota.engine.model.spec import read_spec
from rota.runtime.doorbell import Doorbell
from rota.runtime.live import LiveWorld
from rota.runtime.loop import run
from rota.runtime.offline import OfflineInbox
from rota.scheduler import Scheduler

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
# Adapters by number: first six of rank 16, then mixed ones.
RANKS = [16] * 6 + [8, 16, 32, 64] * 8


def make_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    return folder


def make_adapter(folder: Path, model: Path, rank: int) -> None:
    """A random PEFT folder on all seven projections."""
    folder.mkdir()
    spec, tensors = read_spec(model), {}
    for layer in range(spec.layers):
        for shape in site_shapes(spec):
            for part, width in shape.parts:
                name = f"base_model.model.{module_name(layer, part)}"
                tensors[f"{name}.lora_A.weight"] = torch.randn(rank, shape.inputs, dtype=torch.bfloat16) * 0.02
                tensors[f"{name}.lora_B.weight"] = torch.randn(width, rank, dtype=torch.bfloat16) * 0.02
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = [part for shape in site_shapes(spec) for part, _ in shape.parts]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


@dataclass
class Timed:
    """A device that notes what every step held and when its tokens came."""

    engine: Engine
    steps: list[tuple[StepPlan, float]] = field(default_factory=list)
    waiting: list[StepPlan] = field(default_factory=list)

    @property
    def capacity(self):
        return self.engine.capacity

    def listen(self, post) -> None:
        self.engine.listen(post)

    def submit(self, plan: StepPlan):
        self.waiting.append(plan)
        return self.engine.submit(plan)

    def collect(self, ticket) -> StepResult:
        result = self.engine.collect(ticket)
        self.steps.append((self.waiting.pop(0), result.at))
        return result


class Bench:
    """Engine and books, and how to put a load on them."""

    def __init__(self, config: EngineConfig) -> None:
        started_at = time.monotonic()
        self.device = Timed(build_engine(config))
        self.start_s = time.monotonic() - started_at
        self.scheduler = Scheduler.from_config(config, self.device.capacity)
        self.doorbell = Doorbell()
        self.events: list[Event] = []
        self.timings: list[dict[str, float]] = []

    def add(self, adapters: list[Adapter]) -> None:
        self._run(OfflineInbox(adapters=adapters, doorbell=self.doorbell))

    def serve(self, count: int, prompt: int, output: int, adapters: list[AdapterId], stagger: int = 0) -> list[float]:
        """Seconds of every step that only decodes; with `stagger`, requests are longer one after another."""
        self.device.steps.clear()
        now = time.monotonic()
        asked = [
            Request(
                RequestId(f"r{number}"),
                tuple((number * 7919 + i * 31) % 100_000 for i in range(prompt)),
                SamplingParams(max_new_tokens=output + number * stagger, temperature=0.0),
                now + number * 1e-6,
                adapters[number % len(adapters)],
            )
            for number in range(count)
        ]
        self._run(OfflineInbox(asked, 1000, doorbell=self.doorbell))
        steps = self.device.steps
        decode_s: list[float] = []
        for (before, was_at), (plan, at) in itertools.pairwise(steps):
            self.timings.append(
                {
                    "decodes": len(plan.decodes),
                    "prompt_tokens": sum(chunk.length for chunk in plan.chunks),
                    "context_tokens": plan.context_tokens,
                    "adapters": plan.adapters,
                    "seconds": at - was_at,
                }
            )
            if len(plan.decodes) == count and not plan.chunks and not before.chunks:
                decode_s.append(at - was_at)
        return decode_s

    def _run(self, inbox: OfflineInbox) -> None:
        self.events.clear()

        def emit(events: list[Event]) -> None:
            self.events.extend(events)
            for event in events:
                if isinstance(event, Finished):
                    assert event.fault is None, event.fault
                    inbox.note_ended(event.request_id)
                elif isinstance(event, AdapterAdded | AdapterRefused):
                    assert isinstance(event, AdapterAdded), event
                    inbox.note_ended(event.adapter_id)

        run(self.scheduler, LiveWorld(self.device, inbox), emit, depth=2)

    def load_times_s(self) -> list[float]:
        """From the order to the message, for every load of the last run."""
        begun: dict[AdapterId, float] = {}
        taken: list[float] = []
        for event in self.events:
            if isinstance(event, SlotChanged) and event.state is SlotState.LOADING:
                begun[event.adapter_id] = event.at
            elif isinstance(event, SlotChanged) and event.state is SlotState.READY and event.adapter_id in begun:
                taken.append(event.at - begun.pop(event.adapter_id))
        return taken


def milliseconds(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "median": round(statistics.median(ordered) * 1e3, 3),
        "p99": round(ordered[int(len(ordered) * 0.99)] * 1e3, 3),
        "max": round(ordered[-1] * 1e3, 3),
    }


def prefill_tokens_per_s(bench: Bench, adapters: list[AdapterId]) -> float:
    """8 × 512 tokens in one step, best of several."""
    best = 0.0
    for _ in range(4):
        bench.device.steps.clear()
        started_at = time.monotonic()
        bench.serve(8, 512, 1, adapters)
        best = max(best, 8 * 512 / (bench.device.steps[-1][1] - started_at))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--timings", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = make_model(folder / "model")
        for rank in sorted(set(RANKS)):
            make_adapter(folder / f"rank{rank}", model, rank)
        results, timings = measure(folder, model)
    print(json.dumps(results, indent=2))
    if options.output:
        options.output.write_text(json.dumps(results, indent=2))
    if options.timings:
        options.timings.write_text(json.dumps(timings))


def start(model: Path, slots: int) -> Bench:
    return Bench(
        EngineConfig(
            ModelConfig(str(model), load_format="dummy", device="cuda"),
            CacheConfig(),
            SchedulerConfig(max_running_requests=64, chunked_prefill_size=4096, enable_prefix_caching=False),
            LoraConfig(max_loras_per_batch=slots, max_lora_rank=64),
        )
    )


def measure(folder: Path, model: Path) -> tuple[dict[str, Any], list[dict[str, float]]]:
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    adapters = [Adapter(AdapterId(n), f"a{n}", str(folder / f"rank{rank}")) for n, rank in enumerate(RANKS, start=1)]
    timings = measure_few(start(model, slots=8), adapters[:6], results)
    torch.cuda.empty_cache()
    timings += measure_many(start(model, slots=32), adapters, results)
    return results, timings


def measure_few(bench: Bench, adapters: list[Adapter], results: dict[str, Any]) -> list[dict[str, float]]:
    """Base and six adapters, slots for all."""
    results["start_s"] = round(bench.start_s, 1)
    bench.add(adapters)
    six = [adapter.adapter_id for adapter in adapters]
    bench.serve(64, 100, 8, [BASE, *six])  # everything compiled, and every adapter in its slot
    results["decode 1 x 600, base"] = milliseconds(bench.serve(1, 560, 80, [BASE]))
    results["decode 64 x 600, base"] = milliseconds(bench.serve(64, 560, 80, [BASE]))
    results["decode 64 x 2000, base"] = milliseconds(bench.serve(64, 1960, 80, [BASE]))
    results["decode 64 x 600, one adapter"] = milliseconds(bench.serve(64, 560, 80, six[:1]))
    results["decode 64 x 600, six adapters"] = milliseconds(bench.serve(64, 560, 80, six))
    results["prefill 8 x 512, base, tokens/s"] = round(prefill_tokens_per_s(bench, [BASE]))
    results["prefill 8 x 512, six adapters, tokens/s"] = round(prefill_tokens_per_s(bench, six))
    for size in (8, 16, 32, 48):  # for the cost model: other sizes, and prompts among decodes
        bench.serve(size, 300, 40, [BASE, *six], stagger=3)
    return bench.timings


def measure_many(bench: Bench, adapters: list[Adapter], results: dict[str, Any]) -> list[dict[str, float]]:
    """32 adapters of mixed rank in their slots, then six more that take turns with them."""
    bench.add(adapters)
    six, mixed = [[one.adapter_id for one in some] for some in (adapters[:6], adapters[6:])]
    bench.serve(32, 16, 4, mixed)
    results["decode 64 x 600, 32 adapters of rank 8-64"] = milliseconds(bench.serve(64, 560, 80, mixed))
    bench.serve(38, 200, 400, [*six, *mixed])
    results["loads while decoding, order to message"] = milliseconds(bench.load_times_s())
    return bench.timings


if __name__ == "__main__":
    main()
