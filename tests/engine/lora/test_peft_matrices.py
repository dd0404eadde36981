"""Embeddings and heads of adapters' own are answered as PEFT answers them, in one batch with all others."""

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
from tests.engine.lora.adapter_factory import change_tensors, load_with_peft
from tests.engine.lora.features import World, assert_answers_as_peft, assert_refused, world_of
from tests.engine.lora.mixed_server import Server, adapter
from tests.engine.model_factory import make_tiny_model

FEATURES: dict[int, dict[str, Any]] = {
    1: {},
    2: {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]},
    3: {"modules_to_save": ["embed_tokens"]},
    4: {"modules_to_save": ["embed_tokens", "lm_head"], "target_modules": ["down_proj"]},
    5: {"modules_to_save": ["lm_head"], "target_modules": ["lm_head", "v_proj"]},  # it has no factors there
    6: {"target_modules": ["lm_head", "embed_tokens"]},
    7: {"modules_to_save": ["lm_head"], "trainable_token_indices": [20, 9, 100]},
}
ALL = FirstAdapters(count=7, rank=4, pages=7, extras=Extra.EMBEDDING | Extra.HEAD, matrices=6)
WAYS: dict[str, dict[str, Any]] = {
    "places for all": {"slots": len(FEATURES), "first": ALL},
    "places for three, in turns": {
        "slots": 4,
        "turn_ms": 0.001,
        "first": FirstAdapters(count=7, rank=4, pages=7, extras=ALL.extras, matrices=3),
    },
    "chunked": {"slots": 3, "chunk": 16, "first": ALL},
    "in pages": {
        "slots": "auto",
        "first": FirstAdapters(count=7, rank=12, pages=8, extras=ALL.extras, matrices=2),
    },
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return world_of("llama3", tmp_path_factory.mktemp("matrices"), FEATURES)


@pytest.mark.parametrize("way", WAYS)
def test_whole_matrices_in_one_batch_are_answered_as_peft_alone_answers_them(world, way):
    server = Server(world.model, **WAYS[way])
    assert server.engine.capacity.matrices == WAYS[way]["first"].matrices
    assert bool(server.engine.capacity.pages) == (way == "in pages")
    assert_answers_as_peft(server, world)


FAMILIES: dict[str, dict[int, dict[str, Any]]] = {
    "smollm2": {  # tied: in PEFT the one does not change the other, unless the config asks for it
        2: FEATURES[2],
        3: FEATURES[3],
        8: {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True, "target_modules": ["q_proj"]},
    },
    "gemma3": {4: FEATURES[4]},  # the embedding is multiplied, and the logits are capped
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_treat_their_ends_as_peft_does(family, tmp_path):
    world = world_of(family, tmp_path, FAMILIES[family])
    assert_answers_as_peft(Server(world.model, slots=2, first=FirstAdapters(count=3, rank=4, matrices=4)), world)


def test_a_prompt_is_scored_with_the_head_of_its_adapter(world):
    prompt = next(prompt for prompt in world.answers if len(prompt) > 9)
    server = Server(world.model, slots=2, first=ALL)
    server.add(adapter(2, world.adapters))
    one = request("scored", prompt=prompt, max_new_tokens=1, adapter=AdapterId(2), prompt_logprobs=0)
    told = [event for event in server.serve([one]) if isinstance(event, PromptsScored)]
    model = make_tiny_model(world.adapters / "again", "llama3")
    logits = load_with_peft(world.adapters / "2", model)(torch.tensor([prompt])).logits[0].log_softmax(-1)
    right = [float(logits[at, token]) for at, token in enumerate(prompt[1:])]
    assert [each.chosen for event in told for one in event.scores for each in one] == pytest.approx(right, abs=1e-4)


def test_an_adapter_without_room_for_its_matrices_is_refused_with_the_numbers(world):
    server = Server(world.model, slots=2, first=FirstAdapters(count=1, rank=4, matrices=1))
    events = server.add(*(adapter(number, world.adapters) for number in (1, 2, 4)))
    (refused,) = [event for event in events if isinstance(event, AdapterRefused)]
    assert int(refused.adapter_id) == 4
    matrix = 256 * 64 * 4
    assert f"needs {2 * matrix:,} bytes on the device for lm_head and model.embed_tokens" in refused.reason
    assert f"this server has {matrix:,} for such matrices" in refused.reason
    assert "--lora-paths" in refused.reason
    assert "--lora-memory-share" in refused.reason


def test_the_bytes_of_matrices_are_counted(world):
    sizes = [
        Server(world.model, slots=2, first=FirstAdapters(count=1, rank=4, matrices=matrices)).engine.capacity
        for matrices in (0, 2)
    ]
    assert sizes[1].adapter_bytes - sizes[0].adapter_bytes == 2 * 256 * 64 * 4


def test_a_server_counts_the_matrices_of_its_first_adapters(world):
    entries = [LoraPath(name=str(number), path=str(world.adapters / str(number))) for number in FEATURES]
    needs = needs_of(entries, Brought())
    assert [one.matrices for one in needs] == [0, 1, 1, 2, 1, 0, 1]
    assert needs[4].extras == Extra.NONE


HEAD = "base_model.model.lm_head.weight"
FAULTS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "another module": ({"modules_to_save": ["norm"]}, None, "'modules_to_save' names 'norm'; Rota serves weights of"),
    "not there": ({}, lambda tensors: tensors.pop(HEAD), "lacks the weight of 'lm_head', which adapter_config.json"),
    "not named": ({"modules_to_save": None}, None, f"holds the tensor '{HEAD}', a whole matrix, but"),
    "more tokens": (
        {},
        lambda tensors: tensors.update({HEAD: torch.zeros(260, 64)}),
        f"'{HEAD}' has the shape [260, 64], but this model has 256 tokens and a hidden size of 64",
    ),
    "both ways": (
        {"trainable_token_indices": {"lm_head": [4]}},
        lambda tensors: tensors.update(
            {"base_model.model.lm_head.token_adapter.trainable_tokens_delta": torch.zeros(1, 64)}
        ),
        "has both 'modules_to_save' and 'trainable_token_indices' for 'lm_head'",
    ),
    "not a number": ({}, lambda tensors: tensors[HEAD].fill_(float("nan")), "has values that are NaN or infinite"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_matrices_that_cannot_be_served_are_refused_with_their_field(world, tmp_path, fault):
    assert_refused(world, 2, FAULTS[fault], tmp_path)


def test_names_of_a_state_dict_are_read_too(world, tmp_path):
    folder = shutil.copytree(world.adapters / "2", tmp_path / "2")
    other = "base_model.model.lm_head.modules_to_save.default.weight"
    change_tensors(folder, lambda tensors: tensors.update({other: tensors.pop(HEAD)}))
    assert describe(folder, read_spec(world.model)).reasons == ()
