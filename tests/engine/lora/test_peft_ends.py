"""Adapters on the embedding and on the head are answered as PEFT answers them, in one batch with all others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rota.core.config import FirstAdapters
from rota.core.events import AdapterRefused, PromptsScored
from rota.core.extras import Extra
from rota.core.ids import AdapterId
from tests.builders import request
from tests.engine.lora.adapter_factory import load_with_peft
from tests.engine.lora.features import World, assert_answers_as_peft, world_of
from tests.engine.lora.mixed_server import Server, adapter
from tests.engine.model_factory import make_tiny_model

FEATURES: dict[int, dict[str, Any]] = {
    1: {},
    2: {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    3: {"target_modules": ["lm_head"], "r": 8},
    4: {"target_modules": ["embed_tokens"], "use_rslora": True},
    5: {"target_modules": ["embed_tokens", "down_proj"], "rank_pattern": {"embed_tokens": 12}},
    6: {"use_dora": True, "target_modules": ["v_proj"]},
}
ENDS = Extra.EMBEDDING | Extra.HEAD
ALL = FirstAdapters(len(FEATURES), 12, 8, ENDS | Extra.TRIMS)
WAYS: dict[str, dict[str, Any]] = {
    "slots for all": {"slots": len(FEATURES)},
    "slots for two, taking turns": {"slots": 2, "turn_ms": 0.001},
    "chunked": {"slots": 3, "chunk": 16},
    "in pages": {"slots": "auto"},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return world_of("llama3", tmp_path_factory.mktemp("ends"), FEATURES)


@pytest.mark.parametrize("way", WAYS)
def test_ends_in_one_batch_are_answered_as_peft_alone_answers_them(world, way):
    server = Server(world.model, first=ALL, **WAYS[way])
    assert bool(server.engine.capacity.pages) == (way == "in pages")
    assert_answers_as_peft(server, world)


FAMILIES = {
    "smollm2": {7: {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True}},  # tied
    "granite": {},  # the embedding and the logits are multiplied
    "gemma3": {},  # tied; the embedding is multiplied, and the logits are capped
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_treat_their_ends_as_peft_does(family, tmp_path):
    world = world_of(family, tmp_path, {2: FEATURES[2], 3: FEATURES[3], 4: FEATURES[4]} | FAMILIES[family])
    assert_answers_as_peft(Server(world.model, slots=3, first=FirstAdapters(4, 8, 4, ENDS)), world)


def test_a_prompt_is_scored_with_the_head_of_its_adapter(world):
    prompt = next(prompt for prompt in world.answers if len(prompt) > 9)
    server = Server(world.model, slots=2, first=ALL)
    server.add(adapter(2, world.adapters), adapter(3, world.adapters))

    def scores(number: int) -> list[float]:
        one = request(f"of {number}", prompt=prompt, max_new_tokens=1, adapter=AdapterId(number), prompt_logprobs=0)
        told = [event for event in server.serve([one]) if isinstance(event, PromptsScored)]
        return [each.chosen for event in told for one in event.scores for each in one]

    for number in (2, 3):
        model = make_tiny_model(world.adapters / "again", "llama3")
        logits = load_with_peft(world.adapters / str(number), model)(torch.tensor([prompt])).logits[0].log_softmax(-1)
        right = [float(logits[at, token]) for at, token in enumerate(prompt[1:])]
        assert scores(number) == pytest.approx(right, abs=1e-4)


def test_an_end_that_no_adapter_at_the_start_has_is_refused_with_what_to_do(world):
    server = Server(world.model, slots=2, first=FirstAdapters(1, 8, 1, Extra.HEAD))
    events = server.add(*(adapter(number, world.adapters) for number in (1, 2, 3, 4)))
    refused = {int(event.adapter_id): event.reason for event in events if isinstance(event, AdapterRefused)}
    assert refused.keys() == {2, 4}
    for reason in refused.values():
        assert "has factors for 'model.embed_tokens', for which this server's slots have no room; start the" in reason
        assert "with this adapter among its --lora-paths" in reason
