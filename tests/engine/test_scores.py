"""A prompt's tokens are as likely here as transformers and PEFT find them, whatever way the prompt takes."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from rota import LLM, SamplingParams
from rota.core.ids import Row
from rota.core.plan import Chunk, Scoring, StepPlan, TokenLogprobs
from rota.engine.drawing import score, tokens_at_once
from rota.engine.step.frames import frame_of, mixed_frame
from rota.engine.step.graphs import StepGraphs
from tests.engine.hand import no_graph
from tests.engine.lora.adapter_factory import load_with_peft, make_adapter
from tests.engine.model_factory import make_tiny_model
from tests.engine.test_inputs import chunk, plan, rows, seat
from tests.tiny_tokenizer import write_byte_tokenizer

TOP = 3
SCORED = SamplingParams(temperature=0.0, max_new_tokens=2, ignore_eos=True, prompt_logprobs=TOP)
ANSWERED = SamplingParams(temperature=0.0, max_new_tokens=16, ignore_eos=True)
DICE = random.Random(5)
PROMPTS = [[DICE.randrange(3, 250) for _ in range(length)] for length in (1, 2, 8, 40)]
ADAPTERS = [None, "pirate", "poet"]

WAYS = {
    "whole": {},
    "chunked, depth 1": {"chunked_prefill_size": 7, "overlap_depth": 1},
    "preempted": {"chunked_prefill_size": 7, "kv_blocks": 16},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> tuple[Path, dict[str | None, PreTrainedModel]]:
    folder = write_byte_tokenizer(tmp_path_factory.mktemp("tiny"))
    model = make_tiny_model(folder, "llama3")
    tuned = [make_adapter(folder / str(name), model, seed) for seed, name in enumerate(ADAPTERS[1:])]
    return folder, dict(zip(ADAPTERS, [model, *(load_with_peft(path, model) for path in tuned)], strict=True))


def reference(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    """[tokens - 1, vocabulary]: how likely every token is after each but the last of a prompt."""
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)


def assert_right(scores: tuple[TokenLogprobs, ...], right: torch.Tensor, prompt: list[int]) -> None:
    chosen = right.gather(1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None])[:, 0]
    assert [entry.chosen for entry in scores] == pytest.approx(chosen.tolist(), abs=1e-3)
    for entry, line in zip(scores, right, strict=True):
        tokens, values = zip(*entry.top, strict=True)
        assert list(values) == pytest.approx(line.topk(TOP).values.tolist(), abs=1e-3)
        assert list(values) == pytest.approx(line[list(tokens)].tolist(), abs=1e-3)


@pytest.mark.parametrize("way", WAYS)
def test_every_token_of_a_prompt_is_as_likely_as_peft_says(world, way):
    folder, models = world
    options = {"kv_block_size": 8, "kv_blocks": 128, "max_running_requests": 6, "max_loras_per_batch": 2, **WAYS[way]}
    paths = {name: folder / name for name in ADAPTERS[1:]}
    llm = LLM(folder, adapters=paths, quiet=True, device="cpu", dtype="float32", **options)
    asked = [(prompt, name) for prompt in PROMPTS for name in ADAPTERS]

    # Others beside them ask for no scores; and in the second round all prompts are in the cache.
    for _ in range(2):
        answers = llm.generate(
            [prompt for prompt, _ in asked * 2],
            [SCORED] * len(asked) + [ANSWERED] * len(asked),
            adapter=[name for _, name in asked * 2],
        )
        for (prompt, name), answer, other in zip(asked, answers, answers[len(asked) :], strict=False):
            assert_right(answer.prompt_logprobs, reference(models[name], prompt), prompt)
            assert other.prompt_logprobs == ()
            assert answer.token_ids == other.token_ids[:2]


def test_scores_are_made_a_slice_at_a_time_for_each_with_as_many_alternatives_as_it_wants():
    state, head = rows(), torch.nn.Linear(16, 300, bias=False)
    step = plan(
        seat(0, 12, 1, 2), seat(4, 9, 3, 4), seat(1, 5, 5), chunks=(chunk(0, 4, 8), chunk(1, 0, 5), chunk(4, 0, 6))
    )
    scorings = (Scoring(row=Row(0), start=6, end=12, top=2), Scoring(row=Row(4), start=1, end=7, top=0))
    step = StepPlan(step_id=1, seats=step.seats, chunks=step.chunks, decodes=(Row(2), Row(3)), scorings=scorings)
    state.accept(step, frame_of(step))
    hidden = torch.randn(2 + 8 + 5 + 6, 16)
    sizes, of_rows = [], []

    def logits_of(some: torch.Tensor, rows: NDArray[np.int64]) -> torch.Tensor:
        sizes.append(len(some))
        of_rows.extend(rows.tolist())
        return head(some)

    with torch.inference_mode():
        scores = score(step, state, hidden, logits_of, at_once=5)
        # Row 0's chunk begins behind two decodes with its token 4, so token 6 is judged at place 3.
        places = [*range(3, 9), *range(15, 21)]
        right = head(hidden[places]).log_softmax(-1)
    tokens = torch.tensor([*range(106, 112), *range(101, 107)])
    assert torch.allclose(scores.chosen, right.gather(1, tokens[:, None])[:, 0], atol=1e-5)
    assert torch.allclose(scores.top, right.topk(2).values, atol=1e-5)
    assert scores.wanted == tuple(enumerate([2] * 6 + [0] * 6))
    assert of_rows == [0] * 6 + [4] * 6
    assert sizes == [5, 5, 2]


@pytest.mark.parametrize("vocabulary", [256, 32_000, 128_256, 10**9])
def test_the_logits_of_a_slice_take_some_tens_of_megabytes_at_most(vocabulary):
    count = tokens_at_once(vocabulary)
    assert count == 1 or count * vocabulary * 4 <= 64e6


def test_a_step_that_scores_goes_without_a_graph():
    frame = mixed_frame(decodes=4, prompt_tokens=32)
    graphs = StepGraphs([(frame, False)], no_graph)
    graphs.capture_next()
    plain = StepPlan(step_id=1, chunks=(Chunk(row=Row(0), start=0, length=8, samples=True),))
    scoring = StepPlan(step_id=1, chunks=plain.chunks, scorings=(Scoring(row=Row(0), start=1, end=8, top=1),))

    assert graphs.frame_for(plain, has_adapters=False) is frame
    assert graphs.frame_for(scoring, has_adapters=False) is None
