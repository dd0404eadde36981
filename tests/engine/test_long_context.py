"""Prompts of 100,000 tokens are answered as transformers answers them, whatever stretched the context."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from rota.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from rota.core.events import Event, Finished
from rota.engine.build import build_engine
from rota.runtime.live import LiveWorld
from rota.runtime.loop import run
from rota.runtime.offline import OfflineInbox
from rota.scheduler import Scheduler
from tests.builders import request
from tests.engine.model_factory import make_tiny_model
from tests.worlds import outputs

LONGEST, PROMPT = 131_072, 100_000
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
}


def answer(folder: Path, prompt: list[int], tokens: int) -> list[int]:
    config = SchedulerConfig(max_running_requests=1)
    model = ModelConfig(model_path=str(folder), dtype="float32", device="cpu")
    cache = CacheConfig(kv_blocks=LONGEST // 16)
    engine = build_engine(EngineConfig(model=model, cache=cache, scheduler=config, quiet=True))
    inbox, events = OfflineInbox([request("long", prompt=tuple(prompt), max_new_tokens=tokens)], max_open=1), []

    def emit(batch: list[Event]) -> None:
        events.extend(batch)
        for event in batch:
            if isinstance(event, Finished):
                inbox.note_ended(event.request_id)

    run(Scheduler(config, engine.capacity), LiveWorld(engine, inbox), emit, depth=1)
    return outputs(events)["long"]


@pytest.mark.long("attention over 100,000 tokens, twice")
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_prompt_of_100_000_tokens_is_answered_as_transformers_does(tmp_path: Path, scaling: str):
    model = make_tiny_model(
        tmp_path,
        "llama2",
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=LONGEST,
        rope_parameters={"rope_theta": 500_000.0, **SCALINGS[scaling]},
    )
    dice = random.Random(3)
    prompt = [dice.randrange(3, 250) for _ in range(PROMPT)]
    with torch.inference_mode():
        right = model.generate(
            torch.tensor([prompt]), max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0
        )[0, PROMPT:].tolist()

    assert answer(tmp_path, prompt, 4) == right
