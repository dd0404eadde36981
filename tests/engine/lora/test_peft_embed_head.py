"""Adapters on the embedding and on the head are answered as PEFT answers them, in one batch with all others."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from rota.commands.adapters.inspect import describe
from rota.core.adapter import Extra
from rota.core.config import FirstAdapters
from rota.core.events import AdapterRefused, PromptsScored
from rota.core.ids import AdapterId
from rota.core.lora_paths import LoraPath
from rota.engine.families.table import read_spec
from rota.engine.lora.files.brought import Brought
from rota.engine.lora.files.ranks import needs_of
from tests.builders import request
from tests.engine.lora.adapter_factory import change_config, change_tensors, load_with_peft
from tests.engine.lora.features import World, assert_answers_as_peft, assert_refused, world_of
from tests.engine.lora.mixed_server import Server, adapter
from tests.engine.model_factory import make_tiny_model

# Some tokens of the prompts, and others.
OFTEN = [20, 9, *range(100, 110)]
FEATURES: dict[int, dict[str, Any]] = {
    1: {},
    2: {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    3: {"target_modules": ["lm_head"], "r": 8},
    4: {"target_modules": ["embed_tokens"], "use_rslora": True},
    5: {"target_modules": ["embed_tokens", "down_proj"], "rank_pattern": {"embed_tokens": 12}},
    6: {"use_dora": True, "target_modules": ["v_proj"]},
    7: {"trainable_token_indices": OFTEN},
    8: {"trainable_token_indices": {"embed_tokens": OFTEN[:5], "lm_head": OFTEN[3:]}, "target_modules": ["o_proj"]},
    9: {"use_dora": True, "target_modules": ["embed_tokens", "lm_head", "k_proj"]},
    10: {"lora_bias": True, "target_modules": ["lm_head", "gate_proj"]},
}
END_MODULES = Extra.EMBEDDING | Extra.HEAD
ALL = FirstAdapters(count=len(FEATURES), rank=12, pages=10, extras=END_MODULES | Extra.GAIN_BIAS)
WAYS: dict[str, dict[str, Any]] = {
    "slots for all": {"slots": len(FEATURES)},
    "slots for two, taking turns": {"slots": 2, "turn_ms": 0.001},
    "chunked": {"slots": 3, "chunk": 16},
    "in pages": {"slots": "auto"},
    "a start without adapters": {"slots": 4, "first": FirstAdapters()},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return world_of("llama3", tmp_path_factory.mktemp("ends"), FEATURES)


@pytest.mark.parametrize("way", WAYS)
def test_ends_in_one_batch_are_answered_as_peft_alone_answers_them(world, way):
    server = Server(world.model, **{"first": ALL, **WAYS[way]})
    assert bool(server.engine.capacity.pages) == (way == "in pages")
    assert_answers_as_peft(server, world)


FAMILIES = {
    "smollm2": {  # tied
        7: {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
        8: {"trainable_token_indices": OFTEN},
        9: {"use_dora": True, "target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
    },
    "granite": {8: {"trainable_token_indices": {"lm_head": OFTEN}}},  # the embedding and the logits are multiplied
    "gemma3": {8: {"trainable_token_indices": OFTEN}},  # tied; the embedding is multiplied, and the logits are capped
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_treat_their_ends_as_peft_does(family, tmp_path):
    world = world_of(family, tmp_path, {2: FEATURES[2], 3: FEATURES[3], 4: FEATURES[4]} | FAMILIES[family])
    first = FirstAdapters(count=4, rank=12, pages=4, extras=END_MODULES | Extra.GAIN_BIAS)
    assert_answers_as_peft(Server(world.model, slots=3, first=first), world)


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


def test_a_copy_of_another_model_s_embedding_or_head_is_refused(world, tmp_path):
    for number, module in ((2, "model.embed_tokens"), (3, "lm_head")):
        folder = shutil.copytree(world.adapters / str(number), tmp_path / str(number))
        name = f"base_model.model.{module}.base_layer.weight"
        change_tensors(folder, lambda tensors, name=name: tensors[name].mul_(1.5))
        events = Server(world.model, slots=2, first=ALL).add(adapter(number, tmp_path))
        (refused,) = [event for event in events if isinstance(event, AdapterRefused)]
        assert f"the tensor '{name}' is not this model's own" in refused.reason


ROWS = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
TOKEN_FAULTS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "another module": ({"trainable_token_indices": {"wte": [1]}}, None, "names 'wte'; Rota knows model.embed_tokens"),
    "no list": ({"trainable_token_indices": 5}, None, "must have lists of token numbers, not 5"),
    "no numbers": ({"trainable_token_indices": ["a"]}, None, "must have lists of token numbers, not ['a']"),
    "twice": ({"trainable_token_indices": [4] * 12}, None, "names a token twice"),
    "fewer": (
        {"trainable_token_indices": [4]},
        None,
        "names 1 tokens of 'model.embed_tokens', but their rows have the",
    ),
    "beyond": ({"trainable_token_indices": list(range(245, 257))}, None, "names token 256, but this model has 256"),
    "not named": ({"trainable_token_indices": None}, None, "does not name its tokens in 'trainable_token_indices'"),
    "no rows": ({}, lambda tensors: tensors.pop(ROWS), "has no rows for them"),
}


@pytest.mark.parametrize("fault", TOKEN_FAULTS)
def test_tokens_that_cannot_be_served_are_refused_with_their_field(world, tmp_path, fault):
    assert_refused(world, 7, TOKEN_FAULTS[fault], tmp_path)


def test_each_token_takes_a_rank(world):
    reasons = describe(world.adapters / "7", read_spec(world.model), max_rank=8).reasons
    assert "names 12 tokens of 'model.embed_tokens', and each takes a rank: over the limit of 8" in reasons[0]
    [needs] = needs_of([LoraPath(name="tokens", path=str(world.adapters / "7"))], Brought())
    assert needs.rank == 12


MAGNITUDE = "base_model.model.lm_head.lora_magnitude_vector"
TRIM_FAULTS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "no magnitude": ({}, lambda tensors: tensors.pop(MAGNITUDE), "lacks the lora_magnitude_vector of 'lm_head'"),
    "another length": (
        {},
        lambda tensors: tensors.update({MAGNITUDE: torch.ones(64)}),
        f"'{MAGNITUDE}' has the shape [64], but this model's lm_head has 256 tokens",
    ),
    "what PEFT itself cannot do": (
        {"use_dora": False, "lora_bias": True},
        lambda tensors: [tensors.pop(name) for name in list(tensors) if "magnitude" in name],
        "lacks the lora_B.bias of",
    ),
}


@pytest.mark.parametrize("fault", TRIM_FAULTS)
def test_trims_of_an_end_that_cannot_be_served_are_refused(world, tmp_path, fault):
    fields, change, sentence = TRIM_FAULTS[fault]
    folder = shutil.copytree(world.adapters / "9", tmp_path / "9")
    change_config(folder, **fields)
    change_tensors(folder, change)
    assert sentence in "\n".join(describe(folder, read_spec(world.model)).reasons)
