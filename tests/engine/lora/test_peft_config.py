"""Every field of PEFT's LoraConfig is known: it is read, it makes no difference, or the adapter is refused."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, LoraRuntimeConfig, get_peft_model

from rota.core.config import FirstAdapters
from rota.core.events import AdapterRefused
from rota.core.ids import AdapterId, RequestId
from rota.engine.lora.files.peft_config import NO_MATTER, READ, REFUSED, read_config
from rota.engine.model.config_file import read_json
from tests.builders import request
from tests.engine.lora.adapter_factory import EVERYTHING, greedy_answer
from tests.engine.lora.features import assert_answers_as_peft, world_of
from tests.engine.lora.mixed_server import Server, adapter
from tests.engine.model_factory import make_tiny_model
from tests.worlds import outputs

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


# Adapters that changed the base are refused with how to convert them, and that way leads to answers of PEFT.

STARTS = {1: "pissa", 2: "olora", 3: "pissa_niter_4"}
PROMPT = (5, 77, 130, 9, 41)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, list[int]]]:
    """Folders as PEFT saves them, and converted ones; and what PEFT answers with each."""
    place = tmp_path_factory.mktemp("conversion")
    model, answers = make_tiny_model(place / "model", "llama3"), {}
    for number, start in STARTS.items():
        torch.manual_seed(number)
        config = LoraConfig(r=4, target_modules=EVERYTHING, init_lora_weights=start)
        tuned = get_peft_model(copy.deepcopy(model), config)
        # As PEFT's guide says: the folder saved before training must not be initialised again when it is read.
        config.init_lora_weights = True
        tuned.save_pretrained(str(place / "before" / str(number)))
        config.init_lora_weights = start
        with torch.no_grad():
            for parameter in tuned.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3 if parameter.requires_grad else 0.0)
        answers[number] = greedy_answer(tuned.eval(), PROMPT, 24)
        tuned.save_pretrained(str(place / "raw" / str(number)))
        tuned.save_pretrained(
            str(place / "plain" / str(number)),
            path_initial_model_for_weight_conversion=str(place / "before" / str(number)),
        )
    assert len({*map(tuple, answers.values())}) == len(STARTS)
    return place, answers


def test_the_way_out_of_the_refusal_leads_to_peft_s_answers(trained):
    place, answers = trained
    server = Server(place / "model", slots=3, first=FirstAdapters(count=3, rank=8, pages=3))
    raw = server.add(*(adapter(number, place / "raw") for number in STARTS))
    refused = [event.reason for event in raw if isinstance(event, AdapterRefused)]
    assert len(refused) == len(STARTS)
    assert all("save_pretrained(path_initial_model_for_weight_conversion=…)" in reason for reason in refused)

    added = server.add(*(adapter(number, place / "plain") for number in STARTS))
    assert [event.reason for event in added if isinstance(event, AdapterRefused)] == []
    asked = [request(f"{one}", prompt=PROMPT, max_new_tokens=24, adapter=AdapterId(one)) for one in STARTS]
    given = outputs(server.serve(asked))
    assert {number: given[RequestId(f"{number}")] for number in STARTS} == answers
