"""A mask leaves exactly the tokens it names, in torch and in Triton, and rows without one as they are."""

from __future__ import annotations

import random
from dataclasses import fields

import numpy as np
import pytest
import torch
from torch import Tensor

from rota.engine.sampling.masks import Masks, RowMasks, mask_logits, packed
from rota.engine.sampling.restrictions import Biases, add_biases
from tests.engine.fake_grammars import masks_of
from tests.engine.triton_interpreter import DEVICE, load

triton_masks = load("rota.engine.sampling.triton_sampling")
triton_biases = load("rota.engine.sampling.triton_sampling")


def on_device(logits: Tensor, masks: Masks | None, limits: RowMasks | None) -> Tensor:
    """The twin for a GPU, with all its tensors there."""
    given = (
        None if one is None else type(one)(*(getattr(one, each.name).to(DEVICE) for each in fields(one)))
        for one in (masks, limits)
    )
    masked: Tensor = triton_masks.mask_logits(logits.to(DEVICE), *given)
    return masked.cpu()


WAYS = pytest.mark.parametrize("way", [mask_logits, on_device], ids=["cpu", "triton"])


@WAYS
@pytest.mark.parametrize("vocabulary", [31, 32, 300, triton_masks.LARGEST_MASK_TILE + 45])
def test_what_a_mask_does_not_name_is_impossible(way, vocabulary):
    dice = random.Random(vocabulary)
    allowed = [
        sorted(dice.sample(range(vocabulary), 9)),
        None,
        [vocabulary - 1],
        range(vocabulary),
        [*range(0, vocabulary, 2)],
        None,
        [],
    ]
    logits = torch.randn(len(allowed), vocabulary)
    right = logits.clone()
    for row, tokens in enumerate(allowed):
        if tokens is not None:
            right[row] = -torch.inf
            right[row, list(tokens)] = logits[row, list(tokens)]

    assert torch.equal(way(logits, masks_of(allowed, vocabulary), None), right)


@WAYS
def test_logits_and_masks_may_be_parts_of_larger_tensors(way):
    buffer = torch.randn(3, 200)
    masks = masks_of([[1, 99], None, [64]], 100)
    together = torch.cat([masks.lines, masks.bits.flatten()])
    found = way(buffer[:, :100], Masks(together[:3], together[3:].view(2, 4)), None)

    assert torch.equal(found[1], buffer[1, :100])
    assert found.isfinite().sum(1).tolist() == [2, 100, 1]
    assert found.argmax(1)[2] == 64


@WAYS
def test_masked_logits_are_float32_whatever_the_model_s_precision(way):
    logits = torch.randn(2, 100).to(torch.bfloat16)
    found = way(logits, masks_of([[5], None], 100), None)

    assert found.dtype == torch.float32
    assert found[0, 5] == logits[0, 5].float()
    assert torch.equal(found[1], logits[1].float())


@pytest.mark.parametrize("way", [add_biases, triton_biases.add_biases], ids=["torch", "triton"])
def test_biases_are_added_to_a_row_s_own_tokens(way):
    tokens = torch.stack([torch.randperm(60)[:12] for _ in range(4)])
    values, counts = torch.randn(4, 12), torch.tensor([[9.0, 0.0], [9.0, 12.0], [9.0, 1.0], [9.0, 7.0]])
    logits, rows = torch.randn(3, 60), [3, 1, 0]
    right = logits.clone()
    for place, row in enumerate(rows):
        for token, value in list(zip(tokens[row], values[row], strict=True))[: int(counts[row, 1])]:
            right[place, token] += value
    found = logits.clone().to(DEVICE)
    biases = Biases(counts.to(DEVICE)[:, 1], tokens.to(DEVICE), values.to(DEVICE))
    way(found, torch.tensor(rows, dtype=torch.int32, device=DEVICE), biases)

    assert torch.equal(found.cpu(), right)


def limits_of(rows: list[int], lengths: list[int], vocabulary: int) -> RowMasks:
    """Row 0 has no limits; row 1 a mask; row 2 one for its first tokens; row 3 has both. Masks: threes and fives."""
    masks = [packed(range(0, vocabulary, 3), vocabulary), packed(range(0, vocabulary, 5), vocabulary)]
    scopes = torch.tensor([[9.0, 0.0, 0.0], [9.0, 1.0, 0.0], [9.0, 0.0, 7.0], [9.0, 1.0, 7.0]])
    bits = torch.from_numpy(np.stack([np.stack(masks)] * 4))
    return RowMasks(*(torch.tensor(each, dtype=torch.int32) for each in (rows, lengths)), scopes[:, 1:], bits)


@WAYS
@pytest.mark.parametrize("vocabulary", [33, triton_masks.LARGEST_MASK_TILE + 45])
def test_limits_hold_for_the_rows_that_have_them_and_for_as_long_as_they_do(way, vocabulary):
    rows, lengths = [3, 0, 1, 2, 3, 2], [6, 6, 6, 6, 7, 7]
    logits = torch.randn(len(rows), vocabulary)
    steps = [3, 1, 5, 3, 5, 1]
    right = torch.full_like(logits, -torch.inf)
    for place, step in enumerate(steps):
        right[place, ::step] = logits[place, ::step]
    limits = limits_of(rows, lengths, vocabulary)

    assert torch.equal(way(logits, None, limits), right)

    masks = masks_of([None, [0, 15, 30], None, [0, 1, 2, 3], [5, 3], None], vocabulary)
    both = way(logits, masks, limits)
    kept = [torch.nonzero(row > -torch.inf).flatten().tolist() for row in both]
    assert [kept[1], kept[3], kept[4]] == [[0, 15, 30], [0, 3], [5]]
    assert torch.equal(both[[0, 2, 5]], right[[0, 2, 5]])
