"""On a GPU, in graphs and under rotation, weights in few bits answer like the weights that their folder means."""

from __future__ import annotations

import random

import pytest
import torch

from rota.engine.choices import FLOAT8_CAPABILITY
from tests.engine.agreement import in_bfloat16, in_eight_bits
from tests.engine.gpu_server import GPUServer, assert_near
from tests.engine.lora.adapter_factory import load_with_peft, make_adapter
from tests.engine.lora.mixed_server import adapter
from tests.engine.model_factory import make_tiny_model
from tests.engine.weights.writers import EIGHT, FOUR, write_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; CI has none")

NEW_TOKENS = 32
# No product has scales for blocks: matrices are rounded again.
BLOCKS = ("8: fine-grained", "8: compressed-tensors, blocks")


@pytest.mark.parametrize("layout", ["plain, rounded to FP8", *EIGHT, *FOUR])
def test_a_mixed_batch_is_answered_like_the_weights_that_the_folder_means(layout, tmp_path):
    bits = 4 if layout in FOUR else 8
    if bits == 8 and torch.cuda.get_device_capability() < FLOAT8_CAPABILITY:
        pytest.skip("this GPU has no eight-bit floats")
    is_plain = layout.startswith("plain")
    folder = tmp_path / "model"
    model = make_tiny_model(folder, "llama2", intermediate_size=128) if is_plain else write_model(folder, layout)
    for number in (1, 2, 3):
        make_adapter(tmp_path / str(number), model, seed=number, r=4 * number)
    dice = random.Random(5)
    prompts = [tuple(dice.randrange(3, 250) for _ in range(length)) for length in (4, 50, 90)]
    server = GPUServer(folder, quantization="fp8" if is_plain else "auto")
    server.add(*(adapter(number, tmp_path) for number in (1, 2, 3)))
    tuned = (load_with_peft(tmp_path / str(number), model) for number in (1, 2, 3))

    def twin_of(reference: torch.nn.Module) -> torch.nn.Module:
        if bits == 4:
            return in_bfloat16(reference)
        return in_eight_bits(reference, rounds_matrices=is_plain or layout in BLOCKS)

    assert_near(server, prompts, NEW_TOKENS, enumerate((model, *tuned)), twin_of)
