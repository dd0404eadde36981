"""On a GPU, in graphs and under rotation, what PEFT saves beside plain factors is answered as near as bfloat16 is."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rota.core.adapter import Extra
from rota.core.config import CacheConfig, EngineConfig, FirstAdapters, LoraConfig, ModelConfig, SchedulerConfig
from rota.core.events import AdapterRefused
from rota.core.ids import AdapterId, RequestId
from rota.core.policy_config import PolicyConfig
from rota.engine.build import build_engine
from rota.runtime.doorbell import Doorbell
from rota.scheduler import Scheduler
from tests.builders import request
from tests.engine.agreement import Agreement, in_bfloat16, logits_of, told_logprobs
from tests.engine.lora import test_peft_embed_head, test_peft_features
from tests.engine.lora.adapter_factory import load_with_peft, make_adapter
from tests.engine.lora.features import Features
from tests.engine.lora.mixed_server import Server, adapter
from tests.engine.model_factory import make_tiny_model
from tests.worlds import outputs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; CI has none")

NEW_TOKENS = 32
OWN = {1: {}, 2: {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}}
OWN |= {3: {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}}
EVERY = Extra.GAIN_BIAS | Extra.EMBEDDING | Extra.HEAD
# A family, its adapters, and what a server is told of them at the start. Room for whole matrices is made there alone.
SETS: dict[str, tuple[str, Features, FirstAdapters]] = {
    "trims": ("qwen2", test_peft_features.FEATURES, FirstAdapters(extras=Extra.GAIN_BIAS)),
    "trims that come later": ("qwen2", test_peft_features.FEATURES, FirstAdapters()),
    "ends": ("llama3", test_peft_embed_head.FEATURES, FirstAdapters(extras=EVERY)),
    "ends that come later": ("llama3", test_peft_embed_head.FEATURES, FirstAdapters()),
    "matrices of their own": ("llama3", OWN, FirstAdapters(matrices=3)),
}


class GPUServer(Server):
    """The tests' server in bfloat16 with graphs; slots for all adapters or for three."""

    def __init__(self, folder: Path, slots: int, first: FirstAdapters) -> None:
        self.config = EngineConfig(
            model=ModelConfig(model_path=str(folder), dtype="bfloat16", device="cuda"),
            cache=CacheConfig(kv_blocks=512),
            scheduler=SchedulerConfig(max_running_requests=32, chunked_prefill_size=32),
            lora=LoraConfig(max_loras_per_batch=slots, max_lora_rank=16),
            policy=PolicyConfig(lora_rotation_quantum_ms=5.0, lora_max_stall_ms=10.0),
            first=first,
            quiet=True,
        )
        self.engine = build_engine(self.config)
        self.scheduler = Scheduler.from_config(self.config, self.engine.capacity)
        self.doorbell = Doorbell()
        self._max_open = 100


@pytest.mark.parametrize("kind", SETS)
def test_a_mixed_batch_is_answered_as_peft_answers(kind, tmp_path):
    family, features, first = SETS[kind]
    model = make_tiny_model(tmp_path / "model", family)
    rounded = copy.deepcopy(model).to(torch.bfloat16).float()
    for number, fields in features.items():
        make_adapter(tmp_path / str(number), model, seed=number, **fields)
    dice = random.Random(5)
    prompts = [tuple(dice.randrange(3, 250) for _ in range(length)) for length in (5, 90)]
    if first != FirstAdapters():
        first = replace(first, count=len(features), rank=16, pages=2)
    server = GPUServer(tmp_path / "model", 3, first)
    added = server.add(*(adapter(number, tmp_path) for number in features))
    assert [event.reason for event in added if isinstance(event, AdapterRefused)] == []
    asked = [
        request(f"{place}-{number}", prompt=prompt, max_new_tokens=NEW_TOKENS, adapter=AdapterId(number), logprobs=0)
        for place, prompt in enumerate(prompts)
        for number in (0, *features)
    ]
    events = server.serve(asked)
    given, told, agreement = outputs(events), told_logprobs(events), Agreement()

    for number in (0, *features):
        tuned = load_with_peft(tmp_path / str(number), rounded) if number else rounded
        twin = in_bfloat16(tuned)
        for place, prompt in enumerate(prompts):
            id = RequestId(f"{place}-{number}")
            right, coarse = (logits_of(one, prompt, given[id]) for one in (tuned, twin))
            agreement.take(given[id], told[id], right, coarse, f"adapter {number}, prompt {place}")
    agreement.check()
