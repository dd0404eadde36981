"""On a GPU, weights that are read in parallel are those of the memory map, and no memory stays pinned."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rota.core.errors import ModelError
from rota.engine.families.table import read_spec
from rota.engine.model.linear import Linear, Projection
from rota.engine.weights.load import Weights, load_weights
from rota.engine.weights.makers import EightBitFloats
from rota.engine.weights.read_ahead import PinnedCopier, RingSetup, no_copier
from tests.engine.model_factory import make_tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; CI has none")

SINGLE = "model.safetensors"
SMALL = RingSetup(threads=3, buffers=2, buffer_bytes=4096)


class Noting(PinnedCopier):
    """Knows its buffers, and whether they were pinned while it worked."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.buffers: list[Tensor] = []
        self.were_pinned: list[bool] = []

    def buffer(self, size: int) -> Tensor:
        """Threads come at one time: the last of the list may be another's."""
        buffer = super().buffer(size)
        self.buffers.append(buffer)
        self.were_pinned.append(buffer.is_pinned())
        return buffer


def weight(projection: Projection) -> Tensor:
    assert isinstance(projection, Linear)
    return projection.weight


def numbers(weights: Weights) -> list[Tensor]:
    found = [weights.embedding, weights.norm, weight(weights.head)]
    for layer in weights.layers:
        found += layer.norms.values()
        found += [weight(site) for site in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    return found


@pytest.mark.parametrize("family", ["llama2", "llama3", "qwen2", "smollm2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_is_the_one_of_the_memory_map(tmp_path, family, dtype):
    make_tiny_model(tmp_path, family)
    device, spec = torch.device("cuda", 0), read_spec(tmp_path)
    copier = Noting(device)
    found = load_weights(tmp_path, spec, device, dtype, True, copier_for=lambda _: copier, ring=SMALL)
    usual = load_weights(tmp_path, spec, device, dtype, True)
    expected = load_weights(tmp_path, spec, device, dtype, True, copier_for=no_copier)

    for some in (found, usual):
        assert all(torch.equal(one, other) for one, other in zip(numbers(some), numbers(expected), strict=True))
    assert copier.were_pinned == [True] * len(copier.buffers)
    assert 1 <= len(copier.buffers) <= SMALL.buffers
    assert not any(buffer.is_pinned() for buffer in copier.buffers)


def test_a_maker_s_work_comes_behind_the_copies(tmp_path):
    make_tiny_model(tmp_path, "llama2", intermediate_size=128)
    device, spec, maker = torch.device("cuda", 0), read_spec(tmp_path), EightBitFloats()
    ring, mapped = (
        load_weights(tmp_path, spec, device, torch.bfloat16, True, maker=maker, copier_for=copier_for, ring=SMALL)
        for copier_for in (PinnedCopier, no_copier)
    )
    x = torch.randn(32, 64, dtype=torch.bfloat16, device=device)
    for one, other in zip(ring.layers, mapped.layers, strict=True):
        assert torch.equal(one.gate_up(x), other.gate_up(x))


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path):
    make_tiny_model(tmp_path, "llama2")
    tensors = load_file(tmp_path / SINGLE)
    tensors["model.norm.weight"][-1] = torch.nan
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(ModelError, match=r"the tensor 'model.norm.weight' has values that are NaN or infinite"):
        load_weights(tmp_path, read_spec(tmp_path), torch.device("cuda", 0), torch.bfloat16, True)
