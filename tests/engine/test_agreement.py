"""Whatever way a request takes through the engine, it gets the tokens `transformers` would give it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rota.core.events import Admitted, Preempted
from rota.core.request import SamplingParams
from rota.engine.families.table import read_spec
from rota.engine.folders.builtin import builtin_model_folder
from rota.runtime.seeds import seeded
from rota.text.tokenizer import Tokenizer
from tests.engine.agreement import choices
from tests.engine.lora.adapter_factory import greedy_answer
from tests.engine.model_factory import FAMILIES, make_tiny_model
from tests.engine.ways import NEW_TOKENS, WAYS, Way, serve


@pytest.fixture(scope="module")
def family(request, tmp_path_factory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make_tiny_model(folder, request.param)


# One family without windows and one with take every way, and the others those two that hold all else.
HARD_WAYS = ("cached prefix", "depth 2, chunked, preempted")
PAIRS = [(name, way) for name in FAMILIES for way in (WAYS if name in ("llama3", "gemma3") else HARD_WAYS)]


@pytest.mark.parametrize(("family", "way"), PAIRS, indirect=["family"])
def test_a_tiny_model_of_every_family_answers_as_transformers_does(family, way):
    folder, model = family
    dice = random.Random(7)
    shared = tuple(dice.randrange(3, 250) for _ in range(20))
    prompts = [
        (shared if i % 2 else ()) + tuple(dice.randrange(3, 250) for _ in range(length))
        for i, length in enumerate([1, 3, 12, 30, 9])
    ]
    answers, events = serve(folder, prompts, WAYS[way])

    assert [len(answer) for answer in answers] == [NEW_TOKENS] * len(prompts)
    assert answers == choices(model, prompts, answers)
    if "preempted" in way and read_spec(folder).widest_window is None:  # with windows, blocks are given back in time
        assert any(isinstance(event, Preempted) for event in events)
    if way == "cached prefix":
        assert all(event.cached_tokens for event in events if isinstance(event, Admitted) and event.request_id == "r3")


def test_a_request_that_samples_gets_the_same_tokens_from_any_engine_preempted_or_not(tmp_path):
    make_tiny_model(tmp_path, FAMILIES[0])
    prompts = [(5, 6, 7), (9, 8, 7, 6), (3, 4), (11, 12, 13, 14, 15)]
    seed = seeded(SamplingParams()).seed  # drawn where a request is made, and by no engine
    served = [serve(tmp_path, prompts, way, temperature=1.0, seed=seed) for way in (Way(), Way(), Way(kv_blocks=16))]

    assert served[0][0] == served[1][0] == served[2][0]
    assert [any(isinstance(event, Preempted) for event in events) for _, events in served] == [False, False, True]


QUESTIONS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):",
    "Water boils at",
    "The three primary colours are",
    "List the days of the week:",
    "Dear Sir or Madam, I am writing to",
    "In 1969, the first man on the moon",
]


def test_the_built_in_model_answers_as_transformers_does():
    folder = builtin_model_folder(quiet=True)
    prompts = [Tokenizer(folder).encode(question) for question in QUESTIONS[:4]]
    answers, _ = serve(folder, prompts, Way(rows=4, chunk=7, kv_blocks=40, depth=2), new_tokens=12)

    assert [len(answer) for answer in answers] == [12] * len(prompts)
    assert answers == choices(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), prompts, answers)


@pytest.mark.long("transformers makes 512 tokens one by one")
def test_the_built_in_model_answers_as_transformers_does_by_itself():
    folder = builtin_model_folder(quiet=True)
    prompts = [Tokenizer(folder).encode(question) for question in QUESTIONS]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    right = [greedy_answer(model, prompt, 64) for prompt in prompts]

    for way in ("batched", "depth 2, chunked, preempted"):
        answers, _ = serve(folder, prompts, replace(WAYS[way], kv_blocks=max(WAYS[way].kv_blocks, 40)), new_tokens=64)
        assert answers == right
