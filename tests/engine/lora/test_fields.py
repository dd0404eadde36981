"""Every field of PEFT's LoraConfig is known: it is read, it makes no difference, or the adapter is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, LoraRuntimeConfig

from rota.core.config import FirstAdapters
from rota.engine.lora.files.peft_config import NO_MATTER, READ, REFUSED, read_config
from rota.engine.model.config_file import read_json
from tests.engine.lora.features import assert_answers_as_peft, world_of
from tests.engine.lora.mixed_server import Server

# Only while it trains, or before.
TRAINED: dict[int, dict[str, Any]] = {
    1: {"init_lora_weights": "gaussian", "lora_dropout": 0.3, "fan_in_fan_out": True, "revision": "main"},
    2: {"init_lora_weights": "mica", "task_type": None, "inference_mode": True},
    3: {"init_lora_weights": "orthogonal", "runtime_config": LoraRuntimeConfig(), "qalora_group_size": 32},
    4: {"init_lora_weights": "eva", "eva_config": None, "corda_config": None, "loftq_config": {}},
    5: {"init_lora_weights": False, "velora_config": {"num_groups": 4, "init_type": "random"}},
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


@pytest.mark.parametrize("start", ["pissa", "PiSSA_niter_16", "olora", "corda", "lora_ga"])
def test_a_start_that_changed_the_base_is_refused_with_how_to_convert(start, tmp_path):
    reason = read_with(tmp_path, "init_lora_weights", start)
    assert f"to '{start}', which also changed the base weights" in reason
    assert "save_pretrained(path_initial_model_for_weight_conversion=…)" in reason


@pytest.mark.parametrize("field", sorted(NO_MATTER))
def test_a_field_of_no_matter_refuses_nothing(field, tmp_path):
    """Such as auto_mapping and peft_version, which PEFT writes, megatron_core, or lora_ga_config once converted."""
    assert read_with(tmp_path, field, {"any": 1}) == ""


def read_with(folder: Path, field: str, value: Any) -> str:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({"peft_type": "LORA", field: value}))
    return "\n".join(read_config(path, read_json(path), [], []).refusals)
