"""A tiny model, adapters with a feature of PEFT each, and a batch of all of them that must be answered as PEFT does."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from rota.commands.adapters.inspect import describe
from rota.core.errors import AdapterError
from rota.core.events import AdapterRefused
from rota.core.ids import AdapterId, RequestId
from rota.engine.families.table import read_spec
from tests.builders import request
from tests.engine.lora.adapter_factory import change_config, change_tensors, greedy_answer, load_with_peft, make_adapter
from tests.engine.lora.mixed_server import Server, adapter
from tests.engine.model_factory import make_tiny_model
from tests.worlds import outputs

NEW_TOKENS = 12
# By number: fields of a LoraConfig.
Features = Mapping[int, dict[str, Any]]
# Fields of the config, what is done to the tensors, and a part of the sentence.
Fault = tuple[dict[str, Any], Callable[[dict[str, Tensor]], Any] | None, str]


@dataclass(frozen=True)
class World:
    """What PEFT answers for each prompt with each adapter; 0 is the base model."""

    model: Path
    adapters: Path
    features: Features
    answers: dict[tuple[int, ...], dict[int, list[int]]]


def world_of(family: str, place: Path, features: Features) -> World:
    model = make_tiny_model(place / "model", family)
    for number, fields in features.items():
        make_adapter(place / str(number), model, seed=number, **fields)
    dice = random.Random(5)
    prompts = [tuple(dice.randrange(3, 250) for _ in range(length)) for length in (5, 90)]
    answers = {prompt: {0: greedy_answer(model, prompt, NEW_TOKENS)} for prompt in prompts}
    for number in features:
        tuned = load_with_peft(place / str(number), model)
        for prompt in prompts:
            answers[prompt][number] = greedy_answer(tuned, prompt, NEW_TOKENS)
    different = {str([answers[prompt][number] for prompt in prompts]) for number in (0, *features)}
    assert len(different) == len(features) + 1, "each feature changes something"
    return World(place / "model", place, features, answers)


def only(world: World, *numbers: int) -> World:
    """The world with these adapters alone."""
    answers = {prompt: {number: right[number] for number in (0, *numbers)} for prompt, right in world.answers.items()}
    return replace(world, features={number: world.features[number] for number in numbers}, answers=answers)


def assert_answers_as_peft(server: Server, world: World) -> None:
    """All prompts with all adapters at once."""
    added = server.add(*(adapter(number, world.adapters) for number in world.features))
    assert [event.reason for event in added if isinstance(event, AdapterRefused)] == []
    ask_all(server, world)


def ask_all(server: Server, world: World) -> None:
    """The same of a server that has the adapters."""
    asked = [
        request(f"{place}-{number}", prompt=prompt, max_new_tokens=NEW_TOKENS, adapter=AdapterId(number))
        for place, prompt in enumerate(world.answers)
        for number in (0, *world.features)
    ]
    given = outputs(server.serve(asked))
    for place, answers in enumerate(world.answers.values()):
        for number, right in answers.items():
            assert given[RequestId(f"{place}-{number}")] == right, f"adapter {number}: {world.features.get(number)}"


def assert_refused(world: World, number: int, fault: Fault, place: Path) -> None:
    """An adapter that was changed is refused with the fault's sentence."""
    fields, change, sentence = fault
    folder = shutil.copytree(world.adapters / str(number), place / str(number))
    change_config(folder, **fields)
    if change is not None:
        change_tensors(folder, change)
    try:
        reasons = describe(folder, read_spec(world.model)).reasons
    except AdapterError as error:
        reasons = (str(error),)
    assert sentence in "\n".join(reasons)
