"""On a GPU in bfloat16, in graphs and under rotation, answers are as near to the reference as bfloat16 is."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import Tensor

from rota.core.ids import AdapterId, RequestId
from rota.engine.lora import layout
from tests.builders import request
from tests.engine.agreement import (
    CLEAR_MARGIN,
    MOST_ABOVE_TWIN,
    in_bfloat16,
    logits_of,
    told_logprobs,
    told_scores,
)
from tests.engine.gpu_server import GPUServer, assert_near
from tests.engine.lora.adapter_factory import load_with_peft, make_adapter
from tests.engine.lora.mixed_server import adapter
from tests.engine.model_factory import WINDOWED, make_tiny_model
from tests.worlds import outputs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; CI has none")

NEW_TOKENS = 48


@pytest.mark.parametrize("fused_lora_a", ["apart", "below the matrices"])
@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3", "smollm2", "olmo2", "granite", *WINDOWED])
def test_every_token_is_the_references_wherever_that_is_sure(family, fused_lora_a, tmp_path, monkeypatch):
    # Any bank is large beside a tiny model's matrices.
    monkeypatch.setattr(layout, "LARGEST_SHARE", 0.0 if fused_lora_a == "apart" else 100.0)
    model = make_tiny_model(tmp_path / "model", family)
    rounded = copy.deepcopy(model).to(torch.bfloat16).float()
    for number in (1, 2, 3):
        make_adapter(tmp_path / str(number), model, seed=number, r=4 * number)
    dice = random.Random(5)
    prompts = [tuple(dice.randrange(3, 250) for _ in range(length)) for length in (4, 50, 90)]
    server = GPUServer(tmp_path / "model")
    server.add(*(adapter(number, tmp_path) for number in (1, 2, 3)))
    tuned = (load_with_peft(tmp_path / str(number), rounded) for number in (1, 2, 3))

    given = assert_near(server, prompts, NEW_TOKENS, enumerate((rounded, *tuned)), in_bfloat16)

    assert all(len(answer) == NEW_TOKENS for answer in given.values())


@pytest.mark.parametrize("family", ["llama3", "mistral, windowed"])
def test_with_keys_and_values_in_eight_bits_answers_are_as_near_as_eight_bits_are_in_float32(family, tmp_path):
    """In graphs and outside, with long and short rows, under rotation; the twin is this engine on a CPU."""
    model = make_tiny_model(tmp_path / "model", family)
    rounded = copy.deepcopy(model).to(torch.bfloat16).float()
    for number in (1, 2, 3):
        make_adapter(tmp_path / str(number), model, seed=number, r=4)
    dice = random.Random(5)
    prompts = [tuple(dice.randrange(3, 250) for _ in range(length)) for length in (4, 50, 90, 300)]
    server, twin = (GPUServer(tmp_path / "model", kv_cache_dtype="fp8", device=device) for device in ("cuda", "cpu"))
    for one in (server, twin):
        one.add(*(adapter(number, tmp_path) for number in (1, 2, 3)))
    pairs = [(number, prompt) for number in range(4) for prompt in prompts]
    events = server.serve(
        [
            request(str(place), prompt=prompt, max_new_tokens=NEW_TOKENS, adapter=AdapterId(number), logprobs=0)
            for place, (number, prompt) in enumerate(pairs)
        ]
    )
    given, told = outputs(events), told_logprobs(events)
    again = [
        request(str(place), prompt=(*prompt, *given[RequestId(str(place))]), max_new_tokens=1,
                adapter=AdapterId(number), prompt_logprobs=0)
        for place, (number, prompt) in enumerate(pairs)
    ]  # fmt: skip
    scored = told_scores(twin.serve(again))

    assert server.engine.capacity.kv_dtype == "float8_e4m3fn"
    tuned = {number: load_with_peft(tmp_path / str(number), rounded) if number else rounded for number in range(4)}
    errors: tuple[list[Tensor], list[Tensor]] = ([], [])
    for place, (number, prompt) in enumerate(pairs):
        id = RequestId(str(place))
        right = logits_of(tuned[number], prompt, given[id]).log_softmax(1).gather(1, torch.tensor(given[id])[:, None])
        for kept, found in zip(errors, (told[id], scored[id][len(prompt) - 1 :]), strict=True):
            kept.append((torch.tensor(found) - right[:, 0]).abs())
    ours, theirs = (torch.cat(kept) for kept in errors)
    assert ours.mean() <= MOST_ABOVE_TWIN * theirs.mean()
    # The largest of some eight hundred errors is a matter of chance.
    assert ours.max() <= 2 * theirs.max()


def test_a_prompt_s_tokens_are_as_likely_as_the_reference_says_beside_steps_in_graphs(tmp_path):
    model = make_tiny_model(tmp_path / "model", "llama3")
    rounded = copy.deepcopy(model).to(torch.bfloat16).float()
    make_adapter(tmp_path / "1", model, seed=1)
    dice = random.Random(5)
    prompt = tuple(dice.randrange(3, 250) for _ in range(90))
    server = GPUServer(tmp_path / "model")
    server.add(adapter(1, tmp_path))
    events = server.serve(
        [
            request("plain", prompt=50, max_new_tokens=NEW_TOKENS),
            request("0", prompt=prompt, prompt_logprobs=1, arrived_at=1.0),
            request("1", prompt=prompt, prompt_logprobs=1, arrived_at=2.0, adapter=AdapterId(1)),
        ]
    )

    scores = told_scores(events)
    tuned = load_with_peft(tmp_path / "1", rounded)
    for id, reference in ((RequestId("0"), rounded), (RequestId("1"), tuned)):
        with torch.inference_mode():
            right = reference(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
        chosen = right.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert len(scores[id]) == len(prompt) - 1
        assert (torch.tensor(scores[id]) - chosen).abs().mean() < CLEAR_MARGIN * right.std(dim=1).mean()
