"""Adapters of different ranks that do not all fit into the pages take turns, and each answers as under PEFT."""

from __future__ import annotations

from pathlib import Path

import pytest

from rota.core.config import FirstAdapters
from rota.core.events import SlotChanged, SlotReason
from rota.core.ids import AdapterId
from tests.builders import request
from tests.engine.lora.adapter_factory import greedy_answer, load_with_peft, make_adapter
from tests.engine.lora.mixed_server import Server, adapter
from tests.engine.model_factory import make_tiny_model
from tests.worlds import outputs

NEW_TOKENS = 12
PROMPT = (9, 8, 7, 200, 201, 5, 77)
RANKS = {1: 4, 2: 8, 3: 20, 4: 64, 5: 56, 6: 40}
# What a server has that starts with the first two and the fourth: pages for them, and for one more of rank 64.
FIRST = FirstAdapters(count=3, rank=64, pages=10)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[int, list[int]]]:
    """A tiny model, adapters of it, and what PEFT answers for each."""
    folder, adapters = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("adapters")
    model = make_tiny_model(folder, "llama3")
    answers = {0: greedy_answer(model, PROMPT, NEW_TOKENS)}
    for number, rank in RANKS.items():
        path = make_adapter(adapters / str(number), model, seed=number, r=rank, lora_alpha=rank)
        answers[number] = greedy_answer(load_with_peft(path, model), PROMPT, NEW_TOKENS)
    assert len(set(map(tuple, answers.values()))) == len(answers)
    return folder, adapters, answers


WAYS = {
    "taking turns": {"policy": "rotate"},
    "taking turns, loaded synchronously": {"policy": "rotate", "overlaps": False},
    "waiting": {"policy": "wait"},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_request_is_answered_as_peft_alone_answers_it(world, way):
    folder, adapters, answers = world
    server = Server(folder, "auto", first=FIRST, turn_ms=0.001, **WAYS[way])
    assert server.engine.capacity.pages == 18
    server.add(*(adapter(number, adapters) for number in RANKS))
    asked = [
        request(f"{number}", prompt=PROMPT, max_new_tokens=NEW_TOKENS, adapter=AdapterId(number)) for number in answers
    ]
    events = server.serve(asked)

    assert outputs(events) == {f"{number}": right for number, right in answers.items()}
    turns = sum(isinstance(event, SlotChanged) and event.reason is SlotReason.TURN_OVER for event in events)
    assert bool(turns) == way.startswith("taking turns")  # how many they are is up to the machine
