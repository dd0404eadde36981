"""Measures steps of a Llama-8B shape on a GPU, through the real loop: base, many adapters, prompts, loads meanwhile.

    python benchmarks/gpu_step.py [--output FILE] [--timings FILE]

Weights and adapters are random. Times are between the tokens of consecutive steps, so everything counts: planning,
launching, reading back. `--timings` keeps every step for `rota simulate --calibrate`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from h200.assets import make_adapter, make_model
from h200.shapes import LLAMA_8B
from h200.stage import Stage, load_spans, milliseconds

from rota.core.adapter import Adapter
from rota.core.config import CacheConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from rota.core.ids import BASE, AdapterId

# Adapters by number: first six of rank 16, then mixed ones.
RANKS = [16] * 6 + [8, 16, 32, 64] * 8


def prefill_tokens_per_s(bench: Stage, adapters: list[AdapterId]) -> float:
    """8 × 512 tokens in one step, best of several."""
    best = 0.0
    for _ in range(4):
        bench.device.steps.clear()
        started_at = time.monotonic()
        bench.serve(8, 512, 1, adapters)
        best = max(best, 8 * 512 / (bench.device.steps[-1].ended_at - started_at))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--timings", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = make_model(folder / "model", LLAMA_8B)
        for rank in sorted(set(RANKS)):
            make_adapter(folder / f"rank{rank}", model, rank)
        results, timings = measure(folder, model)
    print(json.dumps(results, indent=2))
    if options.output:
        options.output.write_text(json.dumps(results, indent=2))
    if options.timings:
        options.timings.write_text(json.dumps(timings))


def start(model: Path, slots: int) -> Stage:
    return Stage(
        EngineConfig(
            model=ModelConfig(model_path=str(model), load_format="dummy", device="cuda"),
            cache=CacheConfig(),
            scheduler=SchedulerConfig(max_running_requests=64, chunked_prefill_size=4096, enable_prefix_caching=False),
            lora=LoraConfig(max_loras_per_batch=slots, max_lora_rank=64),
        )
    )


def measure(folder: Path, model: Path) -> tuple[dict[str, Any], list[dict[str, float]]]:
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    adapters = [
        Adapter(adapter_id=AdapterId(n), name=f"a{n}", path=str(folder / f"rank{rank}"))
        for n, rank in enumerate(RANKS, start=1)
    ]
    timings = measure_few(start(model, slots=8), adapters[:6], results)
    torch.cuda.empty_cache()
    timings += measure_many(start(model, slots=32), adapters, results)
    return results, timings


def measure_few(bench: Stage, adapters: list[Adapter], results: dict[str, Any]) -> list[dict[str, float]]:
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


def measure_many(bench: Stage, adapters: list[Adapter], results: dict[str, Any]) -> list[dict[str, float]]:
    """32 adapters of mixed rank in their slots, then six more that take turns with them."""
    bench.add(adapters)
    six, mixed = [[one.adapter_id for one in some] for some in (adapters[:6], adapters[6:])]
    bench.serve(32, 16, 4, mixed)
    results["decode 64 x 600, 32 adapters of rank 8-64"] = milliseconds(bench.serve(64, 560, 80, mixed))
    bench.serve(38, 200, 400, [*six, *mixed])
    results["loads while decoding, order to message"] = milliseconds(
        [end - begin for begin, end in load_spans(bench.events)]
    )
    return bench.timings


if __name__ == "__main__":
    main()
