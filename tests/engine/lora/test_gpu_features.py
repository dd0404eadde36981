"""On a GPU, in graphs, everything that PEFT saves is answered as by PEFT, or as near as bfloat16 is."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
import torch

from rota.core.adapter import Extra
from rota.core.config import FirstAdapters
from rota.core.events import AdapterRefused
from tests.engine.agreement import in_bfloat16
from tests.engine.gpu_server import GPUServer, assert_near
from tests.engine.lora.adapter_factory import load_with_peft, make_adapter
from tests.engine.lora.features import Features, ask_all, assert_answers_as_peft, only, world_of
from tests.engine.lora.mixed_server import Server, adapter
from tests.engine.lora.test_peft_features import ENDS, TRIMS
from tests.engine.model_factory import make_tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; CI has none")

NEW_TOKENS = 32
OWN = {1: {}, 2: {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}}
OWN |= {3: {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}}
EVERY = Extra.GAIN_BIAS | Extra.EMBEDDING | Extra.HEAD
# A family, its adapters, and what a server is told of them at the start. Room for whole matrices is made there alone.
SETS: dict[str, tuple[str, Features, FirstAdapters]] = {
    "trims": ("qwen2", TRIMS, FirstAdapters(extras=Extra.GAIN_BIAS)),
    "trims that come later": ("qwen2", TRIMS, FirstAdapters()),
    "ends": ("llama3", ENDS, FirstAdapters(extras=EVERY)),
    "ends that come later": ("llama3", ENDS, FirstAdapters()),
    "matrices of their own": ("llama3", OWN, FirstAdapters(matrices=3)),
}


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
    server = GPUServer(tmp_path / "model", slots=3, rows=32, first=first)
    added = server.add(*(adapter(number, tmp_path) for number in features))
    assert [event.reason for event in added if isinstance(event, AdapterRefused)] == []
    tuned = ((number, load_with_peft(tmp_path / str(number), rounded)) for number in features)

    assert_near(server, prompts, NEW_TOKENS, ((0, rounded), *tuned), in_bfloat16)


# In float32, in graphs that were captured before such adapters came, the answers are PEFT's own.

FEATURES: Features = {
    1: {},
    2: {"use_dora": True},
    3: {"bias": "all", "lora_bias": True},
    4: {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "use_dora": True},
    5: {"modules_to_save": ["lm_head", "embed_tokens"]},
    6: {"trainable_token_indices": [20, 9, 100]},
}
FIRST = {
    "slots that grow": FirstAdapters(count=1, rank=4, matrices=2),
    "slots for all": FirstAdapters(count=6, rank=4, extras=EVERY, matrices=2),
}


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("family", ["qwen2", "smollm2"])
def test_every_kind_in_one_batch_is_answered_as_peft_alone_answers_it(family, first, tmp_path):
    world = world_of(family, tmp_path, FEATURES)
    server = Server(world.model, slots=3, turn_ms=1.0, first=FIRST[first], device="cuda")
    capture_all(server)
    assert_answers_as_peft(server, only(world, 1))
    assert_answers_as_peft(server, only(world, *(number for number in FEATURES if number > 1)))
    assert server.engine._adapters.bank.extras == EVERY
    capture_all(server)
    ask_all(server, world)


def capture_all(server: Server) -> None:
    while server.engine.work_while_idle():
        pass
