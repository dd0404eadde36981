"""Our forward pass beside transformers', in float32, for a tiny random model of every family."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.engine.model.sequence import Sequences
from tests.engine.model_factory import FAMILIES, make_tiny_model

PROMPT = torch.randint(3, 256, (50,), generator=torch.Generator().manual_seed(5)).tolist()
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    @cache
    def make(family: str) -> tuple[Path, PreTrainedModel]:
        folder = tmp_path_factory.mktemp(family)
        return folder, make_tiny_model(folder, family)

    return make


@torch.inference_mode()
def expected_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    return model(torch.tensor([tokens])).logits[0]


def difference(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found - expected).abs().max())


@pytest.mark.parametrize("operations", ["cpu", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_prompt_in_one_chunk_gives_the_logits_of_transformers(models, family, operations):
    folder, model = models(family)
    found = Sequences(folder, operations=operations).step(chunks={0: PROMPT})
    assert difference(found, expected_logits(model, PROMPT)) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_of_seven_give_the_logits_of_the_whole(models, family):
    folder, model = models(family)
    sequences = Sequences(folder)
    parts = [sequences.step(chunks={0: PROMPT[at : at + 7]}) for at in range(0, len(PROMPT), 7)]
    assert difference(torch.cat(parts), expected_logits(model, PROMPT)) < TOLERANCE


@pytest.mark.parametrize("operations", ["cpu", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_token_by_token_gives_the_logits_of_the_whole(models, family, operations):
    folder, model = models(family)
    sequences = Sequences(folder, operations=operations)
    parts = [sequences.step(decodes={0: token}) for token in PROMPT]
    assert difference(torch.cat(parts), expected_logits(model, PROMPT)) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_different_lengths_decode_while_others_prefill(models, family):
    folder, model = models(family)
    sequences = Sequences(folder, rows=4)
    sequences.step(chunks={0: PROMPT[:30], 1: PROMPT[:3], 2: PROMPT[10:20]})
    found = sequences.step(decodes={1: PROMPT[3], 0: PROMPT[30]}, chunks={2: PROMPT[20:25], 3: PROMPT[:9]})
    expected = torch.cat(
        (
            expected_logits(model, PROMPT[:4])[-1:],
            expected_logits(model, PROMPT[:31])[-1:],
            expected_logits(model, PROMPT[10:25])[-5:],
            expected_logits(model, PROMPT[:9]),
        )
    )
    assert difference(found, expected) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_single(models, dtype):
    folder, model = models("qwen2")
    sequences = Sequences(folder, dtype=dtype)
    found = torch.cat((sequences.step(chunks={0: PROMPT[:-1]}), sequences.step(decodes={0: PROMPT[-1]})))
    expected = expected_logits(model, PROMPT)
    assert found.dtype is dtype
    assert float((found.float() - expected).norm() / expected.norm()) < 0.05


def test_a_llama_with_biases_everywhere_gives_the_logits_of_transformers(tmp_path):
    model = make_tiny_model(tmp_path, "llama2", attention_bias=True, mlp_bias=True)
    assert difference(Sequences(tmp_path).step(chunks={0: PROMPT}), expected_logits(model, PROMPT)) < TOLERANCE


def test_logits_of_no_rows_are_no_logits(models):
    folder, _ = models("smollm2")
    for dtype in (torch.float32, torch.bfloat16):
        assert Sequences(folder, dtype=dtype).model.logits(torch.empty(0, 48, dtype=dtype)).shape == (0, 256)
