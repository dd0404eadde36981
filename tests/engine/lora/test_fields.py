"""Every field of PEFT's LoraConfig is known: it is read, it makes no difference, or the adapter is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from rota.core.config import FirstAdapters
from rota.engine.lora.files.fields import NO_MATTER, READ, REFUSED
from rota.engine.lora.files.peft_config import read_config
from tests.engine.lora.features import assert_answers_as_peft, world_of
from tests.engine.lora.mixed_server import Server

# Only while it trains, or before.
TRAINED: dict[int, dict[str, Any]] = {
    1: {"lora_dropout": 0.3, "fan_in_fan_out": True, "revision": "main", "inference_mode": True},
    2: {"init_lora_weights": "gaussian"},
    3: {"init_lora_weights": "mica"},
    4: {"init_lora_weights": "orthogonal"},
    5: {"velora_config": {"num_groups": 4, "init_type": "random"}},
}


def test_every_field_of_the_installed_peft_is_in_one_of_three_lists():
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    assert fields - READ - NO_MATTER - REFUSED.keys() == set(), (
        "a new release of PEFT: does the field change a product?"
    )
    assert READ & NO_MATTER == READ & REFUSED.keys() == NO_MATTER & REFUSED.keys() == set()
    assert (READ | NO_MATTER | REFUSED.keys()) - fields == set(), "PEFT has no such field"


def test_what_matters_only_in_training_changes_no_answer(tmp_path):
    world = world_of("llama3", tmp_path, TRAINED)
    first = FirstAdapters(count=len(TRAINED), rank=4, pages=len(TRAINED))
    assert_answers_as_peft(Server(world.model, slots=2, first=first), world)


@pytest.mark.parametrize("field", REFUSED)
def test_a_refused_field_is_named(field, tmp_path):
    assert f"sets '{field}': the adapter has {REFUSED[field]}" in read_with(tmp_path, field, {"any": 1})


@pytest.mark.parametrize("nothing", [None, False, [], {}, ""])
@pytest.mark.parametrize("field", [*REFUSED, "of_a_later_release"])
def test_a_field_that_is_not_set_refuses_nothing(field, nothing, tmp_path):
    assert read_with(tmp_path, field, nothing) == ""


def read_with(folder: Path, field: str, value: Any) -> str:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({"peft_type": "LORA", field: value}))
    return "\n".join(read_config(path).refusals)
