"""One rank of a small random model, in graphs and with adapters: what it answers goes to a file as JSON.

    python -m benchmarks.parallel.rank FOLDER RANK SIZE MEETING DTYPE OUTPUT

FOLDER holds `model` and `adapter1` to `adapter3`. Ranks of one group must give the same answers; in float32 they must
be one rank's.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.parallel.by_hand import ByHand
from rota.core.config import CacheConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from rota.core.request import SamplingParams
from rota.engine.build import build_engine

ADAPTERS = 3
CONTEXT, STEPS = 96, 24
# Rows: the base model and each adapter, greedy; then two that draw, and one with penalties.
WAYS = [
    *[(number, SamplingParams(temperature=0.0)) for number in range(ADAPTERS + 1)],
    (1, SamplingParams(temperature=1.0, top_p=0.9, seed=5)),
    (0, SamplingParams(temperature=0.8, seed=6, logprobs=1)),
    (2, SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5)),
]
GREEDY_ROWS = ADAPTERS + 1


def config_of(folder: Path, rank: int, size: int, meeting: str, dtype: str) -> EngineConfig:
    device: Any = "cuda" if torch.cuda.is_available() else "cpu"
    kind: Any = dtype
    return EngineConfig(
        model=ModelConfig(
            model_path=str(folder / "model"),
            load_format="dummy",
            device=device,
            dtype=kind,
            context_length=256,
            tensor_parallel_size=size,
        ),
        cache=CacheConfig(kv_blocks=128),
        scheduler=SchedulerConfig(max_running_requests=8, chunked_prefill_size=32),
        lora=LoraConfig(max_loras_per_batch=ADAPTERS, max_lora_rank=8),
        quiet=True,
        rank=rank,
        meeting=meeting,
        local_ranks=size,
    )


def answers(folder: Path, config: EngineConfig) -> dict[str, Any]:
    """Prompts one by one, then decodes of greedy rows alone, then of all rows, then a prompt that is scored."""
    started_at = time.perf_counter()
    engine = build_engine(config)
    start_s = time.perf_counter() - started_at
    hand = ByHand(engine, CONTEXT, [folder / f"adapter{number}" for number in range(1, ADAPTERS + 1)])
    dice = random.Random(1)
    vocabulary = engine.spec.vocab_size
    prompts = [[dice.randrange(vocabulary) for _ in range(9 + 3 * row)] for row in range(len(WAYS))]
    first = [
        hand.prompt(row, prompts[row], adapter, sampling).tokens[0] for row, (adapter, sampling) in enumerate(WAYS)
    ]
    seconds, alone = hand.decode(GREEDY_ROWS, STEPS)
    mixed_seconds, mixed = hand.decode(len(WAYS), STEPS)
    scored = hand.prompt(len(WAYS), prompts[0] + prompts[1], 1, is_scored=True)
    engine.close()
    return {
        "start_s": round(start_s, 1),
        "greedy": [first[:GREEDY_ROWS], *alone],
        "mixed": [first, *mixed],
        "scores": [score.chosen for score in scored.scores],
        "greedy_step_ms": sorted(seconds)[STEPS // 2] * 1e3,
        "mixed_step_ms": sorted(mixed_seconds)[STEPS // 2] * 1e3,
        "has_graphs": engine._computation.graphs is not None,
    }


def main() -> None:
    folder, rank, size, meeting, dtype, output = sys.argv[1:]
    told = answers(Path(folder), config_of(Path(folder), int(rank), int(size), meeting, dtype))
    Path(output).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
