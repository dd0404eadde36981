"""On a GPU, in graphs captured before such adapters came, everything that PEFT saves is answered as by PEFT."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rota.core.adapter import Extra
from rota.core.config import FirstAdapters
from tests.engine.lora.features import ask_all, assert_answers_as_peft, only, world_of
from tests.engine.lora.mixed_server import Server

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; CI has none")

FEATURES: dict[int, dict[str, Any]] = {
    1: {},
    2: {"use_dora": True},
    3: {"bias": "all", "lora_bias": True},
    4: {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "use_dora": True},
    5: {"modules_to_save": ["lm_head", "embed_tokens"]},
    6: {"trainable_token_indices": [20, 9, 100]},
}
EVERY = Extra.GAIN_BIAS | Extra.HEAD | Extra.EMBEDDING
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
