"""Everything that docs/adapters.md says Rota serves is answered as PEFT answers it, all of it in one batch."""

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
from rota.engine.lora.files.ranks import UNKNOWN_RANK, Needs, needs_of
from tests.builders import request
from tests.engine.lora.adapter_factory import ATTENTION, change_config, change_tensors, load_with_peft
from tests.engine.lora.features import Features, World, assert_answers_as_peft, assert_refused, world_of
from tests.engine.lora.mixed_server import Server, adapter
from tests.engine.model_factory import make_tiny_model

WAYS: dict[str, dict[str, Any]] = {
    "slots for all": {},
    "slots for two, taking turns": {"slots": 2, "turn_ms": 0.001},
    "chunked": {"slots": 3, "chunk": 16},
    "in pages": {"slots": "auto"},
    "a start without adapters": {"slots": 4, "first": FirstAdapters()},
}


def assert_all_answered(world: World, first: FirstAdapters, way: str) -> None:
    server = Server(world.model, **{"slots": len(world.features), "first": first, **WAYS[way]})
    assert bool(server.engine.capacity.pages) == (way == "in pages")
    assert_answers_as_peft(server, world)


def assert_scored(world: World, first: FirstAdapters, numbers: tuple[int, ...]) -> None:
    """A prompt's tokens are as likely under each of these adapters as PEFT says."""
    prompt = next(prompt for prompt in world.answers if len(prompt) > 9)
    server = Server(world.model, slots=2, first=first)
    server.add(*(adapter(number, world.adapters) for number in numbers))
    for number in numbers:
        one = request(f"of {number}", prompt=prompt, max_new_tokens=1, adapter=AdapterId(number), prompt_logprobs=0)
        told = [event for event in server.serve([one]) if isinstance(event, PromptsScored)]
        found = [each.chosen for event in told for one in event.scores for each in one]
        model = make_tiny_model(world.adapters / "again", "llama3")
        logits = load_with_peft(world.adapters / str(number), model)(torch.tensor([prompt])).logits[0].log_softmax(-1)
        assert found == pytest.approx([float(logits[at, token]) for at, token in enumerate(prompt[1:])], abs=1e-4)


TRIMS: Features = {
    1: {},
    2: {"use_dora": True},
    3: {"use_dora": True, "r": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "use_rslora": True},
    4: {"lora_bias": True, "target_modules": ["o_proj", "up_proj", "k_proj"]},
    5: {"bias": "lora_only", "target_modules": ["q_proj", "down_proj"]},
    6: {"bias": "all", "target_modules": ["v_proj", "gate_proj"], "use_dora": True},
    7: {"use_dora": True, "rank_pattern": {"q_proj": 2, "down_proj": 12}, "alpha_pattern": {"q_proj": 5}},
    8: {"use_dora": True, "layers_to_transform": [1], "layers_pattern": "layers", "target_modules": ATTENTION},
}
ALL_TRIMS = FirstAdapters(count=len(TRIMS), rank=12, pages=11, extras=Extra.GAIN_BIAS)


@pytest.fixture(scope="module")
def with_trims(tmp_path_factory: pytest.TempPathFactory) -> World:
    return world_of("qwen2", tmp_path_factory.mktemp("features"), TRIMS)  # queries, keys and values have biases


@pytest.mark.parametrize("way", WAYS)
def test_every_feature_in_one_batch_is_answered_as_peft_alone_answers_it(with_trims, way):
    assert_all_answered(with_trims, ALL_TRIMS, way)


def test_a_server_looks_for_trims_in_the_configs_of_its_first_adapters(with_trims):
    entries = [LoraPath(name=str(number), path=str(with_trims.adapters / str(number))) for number in TRIMS]
    assert [one.extras for one in needs_of(entries, Brought())] == [Extra.NONE, *[Extra.GAIN_BIAS] * 7]
    assert needs_of([LoraPath(name="gone", path="/nowhere")], Brought()) == [Needs(UNKNOWN_RANK, Extra.NONE)]


# Adapters on the embedding and on the head are answered as PEFT answers them, in one batch with all others.

# Some tokens of the prompts, and others.
OFTEN = [20, 9, *range(100, 110)]
ENDS: Features = {
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
ALL_ENDS = FirstAdapters(count=len(ENDS), rank=12, pages=10, extras=END_MODULES | Extra.GAIN_BIAS)


@pytest.fixture(scope="module")
def with_ends(tmp_path_factory: pytest.TempPathFactory) -> World:
    return world_of("llama3", tmp_path_factory.mktemp("ends"), ENDS)


@pytest.mark.parametrize("way", WAYS)
def test_ends_in_one_batch_are_answered_as_peft_alone_answers_them(with_ends, way):
    assert_all_answered(with_ends, ALL_ENDS, way)


FAMILIES_OF_ENDS = {
    "smollm2": {  # tied
        7: {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
        8: {"trainable_token_indices": OFTEN},
        9: {"use_dora": True, "target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
    },
    "granite": {8: {"trainable_token_indices": {"lm_head": OFTEN}}},  # the embedding and the logits are multiplied
    "gemma3": {8: {"trainable_token_indices": OFTEN}},  # tied; the embedding is multiplied, and the logits are capped
}


@pytest.mark.parametrize("family", FAMILIES_OF_ENDS)
def test_families_treat_their_ends_as_peft_does(family, tmp_path):
    world = world_of(family, tmp_path, {2: ENDS[2], 3: ENDS[3], 4: ENDS[4]} | FAMILIES_OF_ENDS[family])
    first = FirstAdapters(count=4, rank=12, pages=4, extras=END_MODULES | Extra.GAIN_BIAS)
    assert_answers_as_peft(Server(world.model, slots=3, first=first), world)


def test_a_prompt_is_scored_with_the_head_of_its_adapter(with_ends):
    assert_scored(with_ends, ALL_ENDS, (2, 3))


def test_a_copy_of_another_model_s_embedding_or_head_is_refused(with_ends, tmp_path):
    for number, module in ((2, "model.embed_tokens"), (3, "lm_head")):
        folder = shutil.copytree(with_ends.adapters / str(number), tmp_path / str(number))
        name = f"base_model.model.{module}.base_layer.weight"
        change_tensors(folder, lambda tensors, name=name: tensors[name].mul_(1.5))
        events = Server(with_ends.model, slots=2, first=ALL_ENDS).add(adapter(number, tmp_path))
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
def test_tokens_that_cannot_be_served_are_refused_with_their_field(with_ends, tmp_path, fault):
    assert_refused(with_ends, 7, TOKEN_FAULTS[fault], tmp_path)


def test_each_token_takes_a_rank(with_ends):
    reasons = describe(with_ends.adapters / "7", read_spec(with_ends.model), max_rank=8).reasons
    assert "names 12 tokens of 'model.embed_tokens', and each takes a rank: over the limit of 8" in reasons[0]
    [needs] = needs_of([LoraPath(name="tokens", path=str(with_ends.adapters / "7"))], Brought())
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
def test_trims_of_an_end_that_cannot_be_served_are_refused(with_ends, tmp_path, fault):
    fields, change, sentence = TRIM_FAULTS[fault]
    folder = shutil.copytree(with_ends.adapters / "9", tmp_path / "9")
    change_config(folder, **fields)
    change_tensors(folder, change)
    assert sentence in "\n".join(describe(folder, read_spec(with_ends.model)).reasons)


# Embeddings and heads of adapters' own are answered as PEFT answers them, in one batch with all others.

MATRICES: Features = {
    1: {},
    2: {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]},
    3: {"modules_to_save": ["embed_tokens"]},
    4: {"modules_to_save": ["embed_tokens", "lm_head"], "target_modules": ["down_proj"]},
    5: {"modules_to_save": ["lm_head"], "target_modules": ["lm_head", "v_proj"]},  # it has no factors there
    6: {"target_modules": ["lm_head", "embed_tokens"]},
    7: {"modules_to_save": ["lm_head"], "trainable_token_indices": [20, 9, 100]},
}
ALL_MATRICES = FirstAdapters(count=7, rank=4, pages=7, extras=Extra.EMBEDDING | Extra.HEAD, matrices=6)
WAYS_OF_MATRICES: dict[str, dict[str, Any]] = {
    "places for all": {"slots": len(MATRICES), "first": ALL_MATRICES},
    "places for three, in turns": {
        "slots": 4,
        "turn_ms": 0.001,
        "first": FirstAdapters(count=7, rank=4, pages=7, extras=ALL_MATRICES.extras, matrices=3),
    },
    "chunked": {"slots": 3, "chunk": 16, "first": ALL_MATRICES},
    "in pages": {
        "slots": "auto",
        "first": FirstAdapters(count=7, rank=12, pages=8, extras=ALL_MATRICES.extras, matrices=2),
    },
}


@pytest.fixture(scope="module")
def with_matrices(tmp_path_factory: pytest.TempPathFactory) -> World:
    return world_of("llama3", tmp_path_factory.mktemp("matrices"), MATRICES)


@pytest.mark.parametrize("way", WAYS_OF_MATRICES)
def test_whole_matrices_in_one_batch_are_answered_as_peft_alone_answers_them(with_matrices, way):
    server = Server(with_matrices.model, **WAYS_OF_MATRICES[way])
    assert server.engine.capacity.matrices == WAYS_OF_MATRICES[way]["first"].matrices
    assert bool(server.engine.capacity.pages) == (way == "in pages")
    assert_answers_as_peft(server, with_matrices)


FAMILIES_OF_MATRICES: dict[str, dict[int, dict[str, Any]]] = {
    "smollm2": {  # tied: in PEFT the one does not change the other, unless the config asks for it
        2: MATRICES[2],
        3: MATRICES[3],
        8: {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True, "target_modules": ["q_proj"]},
    },
    "gemma3": {4: MATRICES[4]},  # the embedding is multiplied, and the logits are capped
}


@pytest.mark.parametrize("family", FAMILIES_OF_MATRICES)
def test_families_treat_whole_matrices_as_peft_does(family, tmp_path):
    world = world_of(family, tmp_path, FAMILIES_OF_MATRICES[family])
    assert_answers_as_peft(Server(world.model, slots=2, first=FirstAdapters(count=3, rank=4, matrices=4)), world)


def test_a_prompt_is_scored_with_an_adapter_s_own_head(with_matrices):
    assert_scored(with_matrices, ALL_MATRICES, (2,))


def test_an_adapter_without_room_for_its_matrices_is_refused_with_the_numbers(with_matrices):
    server = Server(with_matrices.model, slots=2, first=FirstAdapters(count=1, rank=4, matrices=1))
    events = server.add(*(adapter(number, with_matrices.adapters) for number in (1, 2, 4)))
    (refused,) = [event for event in events if isinstance(event, AdapterRefused)]
    assert int(refused.adapter_id) == 4
    matrix = 256 * 64 * 4
    assert f"needs {2 * matrix:,} bytes on the device for lm_head and model.embed_tokens" in refused.reason
    assert f"this server has {matrix:,} for such matrices" in refused.reason
    assert "--lora-paths" in refused.reason
    assert "--lora-memory-share" in refused.reason


def test_the_bytes_of_matrices_are_counted(with_matrices):
    sizes = [
        Server(with_matrices.model, slots=2, first=FirstAdapters(count=1, rank=4, matrices=count)).engine.capacity
        for count in (0, 2)
    ]
    assert sizes[1].adapter_bytes - sizes[0].adapter_bytes == 2 * 256 * 64 * 4


def test_a_server_counts_the_matrices_of_its_first_adapters(with_matrices):
    entries = [LoraPath(name=str(number), path=str(with_matrices.adapters / str(number))) for number in MATRICES]
    needs = needs_of(entries, Brought())
    assert [one.matrices for one in needs] == [0, 1, 1, 2, 1, 0, 1]
    assert needs[4].extras == Extra.NONE


WHOLE_HEAD = "base_model.model.lm_head.weight"
MATRIX_FAULTS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "another module": ({"modules_to_save": ["norm"]}, None, "'modules_to_save' names 'norm'; Rota serves weights of"),
    "not there": (
        {},
        lambda tensors: tensors.pop(WHOLE_HEAD),
        "lacks the weight of 'lm_head', which adapter_config.json",
    ),
    "not named": ({"modules_to_save": None}, None, f"holds the tensor '{WHOLE_HEAD}', a whole matrix, but"),
    "more tokens": (
        {},
        lambda tensors: tensors.update({WHOLE_HEAD: torch.zeros(260, 64)}),
        f"'{WHOLE_HEAD}' has the shape [260, 64], but this model has 256 tokens and a hidden size of 64",
    ),
    "both ways": (
        {"trainable_token_indices": {"lm_head": [4]}},
        lambda tensors: tensors.update(
            {"base_model.model.lm_head.token_adapter.trainable_tokens_delta": torch.zeros(1, 64)}
        ),
        "has both 'modules_to_save' and 'trainable_token_indices' for 'lm_head'",
    ),
    "not a number": (
        {},
        lambda tensors: tensors[WHOLE_HEAD].fill_(float("nan")),
        "has values that are NaN or infinite",
    ),
}


@pytest.mark.parametrize("fault", MATRIX_FAULTS)
def test_matrices_that_cannot_be_served_are_refused_with_their_field(with_matrices, tmp_path, fault):
    assert_refused(with_matrices, 2, MATRIX_FAULTS[fault], tmp_path)


def test_names_of_a_state_dict_are_read_too(with_matrices, tmp_path):
    folder = shutil.copytree(with_matrices.adapters / "2", tmp_path / "2")
    other = "base_model.model.lm_head.modules_to_save.default.weight"
    change_tensors(folder, lambda tensors: tensors.update({other: tensors.pop(WHOLE_HEAD)}))
    assert describe(folder, read_spec(with_matrices.model)).reasons == ()
