"""Adapters that changed the base are refused with how to convert them, and that way leads to answers of PEFT."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from rota.core.config import FirstAdapters
from rota.core.events import AdapterRefused
from rota.core.ids import AdapterId, RequestId
from tests.builders import request
from tests.engine.lora.adapter_factory import EVERYTHING, greedy_answer
from tests.engine.lora.mixed_server import Server, adapter
from tests.engine.model_factory import make_tiny_model
from tests.worlds import outputs

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
