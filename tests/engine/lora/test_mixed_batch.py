"""In a batch of many adapters every request gets the tokens that PEFT alone would give it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rota.core.adapter import Adapter
from rota.core.config import FirstAdapters
from rota.core.errors import FaultCode
from rota.core.events import AdapterRefused, SlotChanged, SlotReason
from rota.core.ids import AdapterId, RequestId
from rota.core.messages import RemoveAdapter
from rota.core.request import Request
from tests.builders import request
from tests.engine.lora.adapter_factory import ATTENTION, change_tensors, greedy_answer, load_with_peft, make_adapter
from tests.engine.lora.mixed_server import Server, adapter
from tests.engine.model_factory import make_tiny_model
from tests.worlds import endings, outputs

NEW_TOKENS = 16
ADAPTERS = {
    1: {"r": 4},
    2: {"r": 8},
    3: {"r": 16, "use_rslora": True},
    4: {"r": 64, "lora_alpha": 32},
    5: {"r": 8, "rank_pattern": {"q_proj": 2, "down_proj": 16}, "alpha_pattern": {"q_proj": 5}},
    6: {"r": 8, "target_modules": ATTENTION},
}
Answers = dict[tuple[int, ...], dict[int, list[int]]]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> tuple[Path, Path, list[tuple[int, ...]], Answers]:
    """A tiny model, six adapters, prompts, and what PEFT answers for each."""
    folder, adapters = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("adapters")
    model = make_tiny_model(folder, "llama3")
    for number, fields in ADAPTERS.items():
        make_adapter(adapters / str(number), model, seed=number, **fields)
    dice = random.Random(3)
    prompts = [tuple(dice.randrange(3, 250) for _ in range(length)) for length in (5, 27)]
    answers: Answers = {prompt: {0: greedy_answer(model, prompt, NEW_TOKENS)} for prompt in prompts}
    for number in ADAPTERS:
        tuned = load_with_peft(adapters / str(number), model)
        for prompt in prompts:
            answers[prompt][number] = greedy_answer(tuned, prompt, NEW_TOKENS)
    return folder, adapters, prompts, answers


def everybody(prompts: list[tuple[int, ...]]) -> list[Request]:
    """Each prompt for each adapter and for the base model, at once."""
    numbers = [0, *ADAPTERS]
    return [
        request(f"{place}-{number}", prompt=prompt, max_new_tokens=NEW_TOKENS, adapter=AdapterId(number))
        for place, prompt in enumerate(prompts)
        for number in numbers
    ]


RESTLESS = {"slots": 2, "turn_ms": 0.001}  # slots change hands every few steps
WAYS = {
    "slots for all": {"slots": 6},
    "rotate, depth 1": {**RESTLESS, "depth": 1},
    "rotate, depth 2": RESTLESS,
    "drain": {**RESTLESS, "policy": "drain", "depth": 1},
    "wait": {**RESTLESS, "policy": "wait"},
    "loaded synchronously": {**RESTLESS, "overlaps": False},
    "chunked": {"slots": 3, "chunk": 16},
    "one at a time": {**RESTLESS, "max_open": 1},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_request_of_a_mixed_batch_is_answered_as_peft_alone_answers_it(world, way):
    folder, adapters, prompts, answers = world
    server = Server(folder, **WAYS[way])
    server.add(*(adapter(number, adapters) for number in ADAPTERS))

    # The second round finds prefixes cached, each adapter its own.
    for round in range(2):
        events = server.serve(everybody(prompts))
        given = outputs(events)
        for place, prompt in enumerate(prompts):
            for number, right in answers[prompt].items():
                assert given[RequestId(f"{place}-{number}")] == right, f"round {round}, adapter {number}"
        if round:
            assert all(end.cached_tokens for id, end in endings(events).items() if id.startswith("1-"))
    if "turn_ms" in WAYS[way]:  # how many turns there are is up to the machine: they are as long as some steps
        turns = [event for event in events if isinstance(event, SlotChanged) and event.reason is SlotReason.TURN_OVER]
        assert bool(turns) == way.startswith(("rotate", "loaded"))


def test_a_name_loaded_again_never_sees_kv_of_its_old_weights(world):
    folder, adapters, prompts, answers = world
    server = Server(folder, slots=2)
    server.add(adapter(1, adapters))
    prompt = prompts[1]
    old = server.serve([request("old", prompt=prompt, max_new_tokens=NEW_TOKENS, adapter=AdapterId(1))])
    server.scheduler.apply(RemoveAdapter(adapter_id=AdapterId(1), at=0.0))
    # The same name with other weights: a new id.
    server.add(Adapter(adapter_id=AdapterId(9), name="adapter1", path=str(adapters / "2")))
    new = server.serve([request("new", prompt=prompt, max_new_tokens=NEW_TOKENS, adapter=AdapterId(9))])

    assert outputs(old)["old"] == answers[prompt][1]
    assert outputs(new)["new"] == answers[prompt][2]
    assert endings(new)["new"].cached_tokens == 0


def test_a_bad_adapter_is_refused_with_its_reason_while_the_others_are_served(world, tmp_path):
    folder, adapters, prompts, answers = world
    server = Server(folder, slots=2)
    events = server.add(
        adapter(1, adapters), Adapter(adapter_id=AdapterId(7), name="missing", path=str(tmp_path / "nowhere"))
    )

    (refused,) = [event for event in events if isinstance(event, AdapterRefused)]
    assert refused.adapter_id == 7
    assert "nowhere" in refused.reason
    served = server.serve([request("good", prompt=prompts[0], max_new_tokens=NEW_TOKENS, adapter=AdapterId(1))])
    assert outputs(served)["good"] == answers[prompts[0]][1]


def test_an_adapter_that_makes_infinities_ruins_no_answer_but_its_own(world, tmp_path):
    folder, _, prompts, answers = world
    model = make_tiny_model(tmp_path / "model", "llama3")
    make_adapter(tmp_path / "9", model, seed=9)
    change_tensors(
        tmp_path / "9", lambda tensors: tensors.update({n: t * 1e25 for n, t in tensors.items() if "lora_B" in n})
    )
    server = Server(folder, slots=2)
    server.add(adapter(9, tmp_path))
    dice = random.Random(4)
    bad = [tuple(dice.randrange(3, 250) for _ in range(length)) for length in (9, 60, 100, 33)]
    ruined = [request(f"bad {i}", prompt=p, adapter=AdapterId(9), max_new_tokens=10) for i, p in enumerate(bad)]
    faults = {ending.fault.code for ending in endings(server.serve(ruined)).values()}
    served = server.serve(
        [request(f"good {i}", prompt=p, temperature=0.0, max_new_tokens=NEW_TOKENS) for i, p in enumerate(prompts)]
        + [request(f"{one.request_id} again", prompt=one.prompt, adapter=AdapterId(9)) for one in ruined]
    )

    assert faults == {FaultCode.NOT_A_NUMBER}
    said = outputs(served)
    assert [said[f"good {i}"] for i in range(len(prompts))] == [answers[prompt][0] for prompt in prompts]


# Adapters of different ranks that do not all fit into the pages take turns, and each answers as under PEFT.

FEW_TOKENS = 12
PROMPT = (9, 8, 7, 200, 201, 5, 77)
RANKS = {1: 4, 2: 8, 3: 20, 4: 64, 5: 56, 6: 40}
# What a server has that starts with the first two and the fourth: pages for them, and for one more of rank 64.
FIRST = FirstAdapters(count=3, rank=64, pages=10)


@pytest.fixture(scope="module")
def world_of_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[int, list[int]]]:
    """A tiny model, adapters of it, and what PEFT answers for each."""
    folder, adapters = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("adapters")
    model = make_tiny_model(folder, "llama3")
    answers = {0: greedy_answer(model, PROMPT, FEW_TOKENS)}
    for number, rank in RANKS.items():
        path = make_adapter(adapters / str(number), model, seed=number, r=rank, lora_alpha=rank)
        answers[number] = greedy_answer(load_with_peft(path, model), PROMPT, FEW_TOKENS)
    assert len(set(map(tuple, answers.values()))) == len(answers)
    return folder, adapters, answers


PAGED_WAYS = {
    "taking turns": {"policy": "rotate"},
    "taking turns, loaded synchronously": {"policy": "rotate", "overlaps": False},
    "waiting": {"policy": "wait"},
}


@pytest.mark.parametrize("way", PAGED_WAYS)
def test_every_request_is_answered_as_peft_alone_answers_it(world_of_ranks, way):
    folder, adapters, answers = world_of_ranks
    server = Server(folder, "auto", first=FIRST, turn_ms=0.001, **PAGED_WAYS[way])
    assert server.engine.capacity.pages == 18
    server.add(*(adapter(number, adapters) for number in RANKS))
    asked = [
        request(f"{number}", prompt=PROMPT, max_new_tokens=FEW_TOKENS, adapter=AdapterId(number)) for number in answers
    ]
    events = server.serve(asked)

    assert outputs(events) == {f"{number}": right for number, right in answers.items()}
    turns = sum(isinstance(event, SlotChanged) and event.reason is SlotReason.TURN_OVER for event in events)
    assert bool(turns) == way.startswith("taking turns")  # how many they are is up to the machine
