"""Whatever way a request takes through the engine, it gets the tokens `transformers` would give it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rota.core.events import Admitted, Preempted
from rota.core.request import SamplingParams
from rota.engine.families.table import read_spec
from rota.engine.folders.builtin import builtin_model_folder
from rota.runtime.seeds import seeded
from rota.text.tokenizer import Tokenizer
from tests.engine.model_factory import FAMILIES, make_tiny_model
from tests.engine.ways import NEW_TOKENS, WAYS, Way, serve


def reference(folder: Path, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    answers = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        made = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )
        answers.append(made[0, len(prompt) :].tolist())
    return answers


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory) -> tuple[Path, list[tuple[int, ...]], list[list[int]]]:
    folder = tmp_path_factory.mktemp(request.param)
    make_tiny_model(folder, request.param)
    dice = random.Random(7)
    shared = tuple(dice.randrange(3, 250) for _ in range(20))
    prompts = [
        (shared if i % 2 else ()) + tuple(dice.randrange(3, 250) for _ in range(length))
        for i, length in enumerate([1, 3, 12, 30, 9])
    ]
    return folder, prompts, reference(folder, prompts)


@pytest.mark.parametrize("way", WAYS)
def test_a_tiny_model_of_every_family_answers_as_transformers_does(family, way):
    folder, prompts, right = family
    answers, events = serve(folder, prompts, WAYS[way])

    assert answers == right
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


def choices(folder: Path, prompts: list[tuple[int, ...]], answers: list[list[int]]) -> list[list[int]]:
    """What `transformers` would say at every place of our answers, had it said before what we said.

    Where that is what we said there, it says the same answer by itself, token by token; and it is asked once an answer.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chosen = []
    with torch.inference_mode():
        for prompt, answer in zip(prompts, answers, strict=True):
            logits = model(torch.tensor([[*prompt, *answer[:-1]]])).logits
            chosen.append(logits[0, len(prompt) - 1 :].argmax(-1).tolist())
    return chosen


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("batched", marks=pytest.mark.long("The other way has batches too, and all else besides.")),
        "depth 2, chunked, preempted",
    ],
)
def test_the_built_in_model_answers_as_transformers_does(way):
    folder = builtin_model_folder(quiet=True)
    prompts = [Tokenizer(folder).encode(question) for question in QUESTIONS]
    asked = WAYS[way]
    answers, _ = serve(folder, prompts, Way(asked.rows, asked.chunk, max(asked.kv_blocks, 40), asked.depth))

    assert [len(answer) for answer in answers] == [NEW_TOKENS] * len(prompts)
    assert choices(folder, prompts, answers) == answers


@pytest.mark.long("transformers makes 512 tokens one by one")
def test_the_built_in_model_answers_as_transformers_does_by_itself():
    folder = builtin_model_folder(quiet=True)
    prompts = [Tokenizer(folder).encode(question) for question in QUESTIONS]

    assert serve(folder, prompts, WAYS["batched"])[0] == reference(folder, prompts)
