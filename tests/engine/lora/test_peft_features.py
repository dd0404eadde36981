"""Everything that docs/adapters.md says Rota serves is answered as PEFT answers it, all of it in one batch."""

from __future__ import annotations

from typing import Any

import pytest

from rota.core.adapter import Extra
from rota.core.config import FirstAdapters
from rota.core.lora_paths import LoraPath
from rota.engine.lora.files.brought import Brought
from rota.engine.lora.files.ranks import UNKNOWN_RANK, Needs, needs_of
from tests.engine.lora.adapter_factory import ATTENTION
from tests.engine.lora.features import World, assert_answers_as_peft, world_of
from tests.engine.lora.mixed_server import Server

FEATURES: dict[int, dict[str, Any]] = {
    1: {},
    2: {"use_dora": True},
    3: {"use_dora": True, "r": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "use_rslora": True},
    4: {"lora_bias": True, "target_modules": ["o_proj", "up_proj", "k_proj"]},
    5: {"bias": "lora_only", "target_modules": ["q_proj", "down_proj"]},
    6: {"bias": "all", "target_modules": ["v_proj", "gate_proj"], "use_dora": True},
    7: {"use_dora": True, "rank_pattern": {"q_proj": 2, "down_proj": 12}, "alpha_pattern": {"q_proj": 5}},
    8: {"use_dora": True, "layers_to_transform": [1], "layers_pattern": "layers", "target_modules": ATTENTION},
}
ALL = FirstAdapters(count=len(FEATURES), rank=12, pages=11, extras=Extra.GAIN_BIAS)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return world_of("qwen2", tmp_path_factory.mktemp("features"), FEATURES)  # queries, keys and values have biases


WAYS: dict[str, dict[str, Any]] = {
    "slots for all": {"slots": len(FEATURES)},
    "slots for two, taking turns": {"slots": 2, "turn_ms": 0.001},
    "chunked": {"slots": 3, "chunk": 16},
    "in pages": {"slots": "auto"},
    "a start without adapters": {"slots": 4, "first": FirstAdapters()},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_feature_in_one_batch_is_answered_as_peft_alone_answers_it(world, way):
    server = Server(world.model, **{"first": ALL, **WAYS[way]})
    assert bool(server.engine.capacity.pages) == (way == "in pages")
    assert_answers_as_peft(server, world)


def test_a_server_looks_for_trims_in_the_configs_of_its_first_adapters(world):
    entries = [LoraPath(name=str(number), path=str(world.adapters / str(number))) for number in FEATURES]
    assert [one.extras for one in needs_of(entries, Brought())] == [Extra.NONE, *[Extra.GAIN_BIAS] * 7]
    assert needs_of([LoraPath(name="gone", path="/nowhere")], Brought()) == [Needs(UNKNOWN_RANK, Extra.NONE)]
