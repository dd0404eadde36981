"""What one of SIZE ranks computes in a step of 64 sequences of 600 tokens, without the others: its part of Llama-8B.

    python -m benchmarks.parallel.compute FOLDER SIZE [tiny]

FOLDER holds `model` and `adapter`. The sums over ranks are left out; a rank's answers are noise.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.parallel.by_hand import ByHand
from rota.core.config import CacheConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from rota.engine.build import build_engine
from rota.engine.parallel.group import ONE_RANK

ROWS, CONTEXT, STEPS, ADAPTERS = 64, 600, 40, 6
# Rows decode up to here.
ROOM = CONTEXT + 8 * STEPS


def measure(folder: Path, size: int, rows: int, context: int) -> dict[str, Any]:
    started_at = time.perf_counter()
    engine = build_engine(config_of(folder, size, rows), ONE_RANK)
    told: dict[str, Any] = {"size": size, "start_s": round(time.perf_counter() - started_at, 1)}
    hand = ByHand(engine, ROOM, [folder / "adapter"] * ADAPTERS)
    told["allocated_gb"] = round(torch.cuda.memory_allocated() / 1e9, 1) if torch.cuda.is_available() else None
    for name, adapters in (
        ("base", 0),
        ("six adapters", ADAPTERS),
        ("base again", 0),
        ("six adapters again", ADAPTERS),
    ):
        for count in (rows, 1):
            told[f"{count} x {context}, {name}"] = milliseconds(hand, count, context, adapters)
    engine.close()
    return told


def milliseconds(hand: ByHand, rows: int, context: int, adapters: int) -> dict[str, float]:
    tokens = [7 * place % 1000 for place in range(context)]
    seats = [hand.seat(row, tokens, row % adapters + 1 if adapters else 0) for row in range(rows)]
    seconds = sorted(hand.decode(rows, STEPS, seats)[0][STEPS // 4 :])
    return {"median": round(statistics.median(seconds) * 1e3, 3), "most": round(seconds[-1] * 1e3, 3)}


def config_of(folder: Path, size: int, rows: int) -> EngineConfig:
    device: Any = "cuda" if torch.cuda.is_available() else "cpu"
    block = 16
    return EngineConfig(
        model=ModelConfig(
            model_path=str(folder / "model"), load_format="dummy", device=device, tensor_parallel_size=size
        ),
        cache=CacheConfig(kv_block_size=block, kv_blocks=rows * -(-ROOM // block)),
        # Few frames, since no prompt is computed here.
        scheduler=SchedulerConfig(max_running_requests=rows, chunked_prefill_size=32),
        lora=LoraConfig(max_loras_per_batch=ADAPTERS, max_lora_rank=16),
        quiet=True,
    )


if __name__ == "__main__":
    is_tiny = sys.argv[3:] == ["tiny"]
    print(json.dumps(measure(Path(sys.argv[1]), int(sys.argv[2]), 4 if is_tiny else ROWS, 20 if is_tiny else CONTEXT)))
