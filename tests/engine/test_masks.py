"""A mask leaves exactly the tokens it names, in torch and in Triton, and rows without one as they are."""

from __future__ import annotations

import random

import pytest
import torch

from rota.engine.sampling.masks import Masks, mask_logits
from tests.engine.fake_grammars import masks_of
from tests.engine.triton_interpreter import DEVICE, load

triton_masks = load("rota.engine.sampling.triton_masks")
WAYS = pytest.mark.parametrize("way", [mask_logits, triton_masks.mask_logits], ids=["torch", "triton"])


def on_device(masks: Masks) -> Masks:
    return Masks(masks.lines.to(DEVICE), masks.bits.to(DEVICE))


@WAYS
@pytest.mark.parametrize("vocabulary", [31, 32, 300, triton_masks.LARGEST_TILE + 45])
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

    assert torch.equal(way(logits.to(DEVICE), on_device(masks_of(allowed, vocabulary))).cpu(), right)


@WAYS
def test_logits_and_masks_may_be_parts_of_larger_tensors(way):
    buffer = torch.randn(3, 200)
    masks = masks_of([[1, 99], None, [64]], 100)
    packed = torch.cat([masks.lines, masks.bits.flatten()]).to(DEVICE)
    found = way(buffer.to(DEVICE)[:, :100], Masks(packed[:3], packed[3:].view(2, 4))).cpu()

    assert torch.equal(found[1], buffer[1, :100])
    assert found.isfinite().sum(1).tolist() == [2, 100, 1]
    assert found.argmax(1)[2] == 64
