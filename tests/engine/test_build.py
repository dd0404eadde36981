"""What an engine asks of a GPU before it reads a byte of weights; the GPU is told of, not there."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from rota.core.errors import ConfigError
from rota.engine import choices
from rota.engine.device import DeviceMemory
from rota.engine.families.table import read_spec
from rota.engine.model.spec import ModelSpec
from rota.engine.weights.load import weight_bytes
from tests.engine.model_factory import make_tiny_model

GPU = torch.device("cuda")
GIBIBYTE = 1 << 30


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """Llama-8B's shape."""
    folder: Path = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, "llama3")
    return dataclasses.replace(
        read_spec(folder), vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, layers=32, heads=32,
        kv_heads=8, head_dim=128, has_tied_embeddings=False,
    )  # fmt: skip


def test_weights_are_counted_as_taken_before_they_are_read(spec, monkeypatch):
    monkeypatch.setattr(choices, "device_memory", lambda *_, **__: DeviceMemory(80 * GIBIBYTE, 2 * GIBIBYTE))
    memory = choices._memory_with_weights(weight_bytes(spec, torch.bfloat16), GPU)
    assert memory == DeviceMemory(80 * GIBIBYTE, 2 * GIBIBYTE + weight_bytes(spec, torch.bfloat16))
    assert 15.9e9 < weight_bytes(spec, torch.bfloat16) < 16.2e9


def test_a_model_that_does_not_fit_is_told_so_and_not_that_its_adapters_do_not(spec, monkeypatch):
    monkeypatch.setattr(choices, "device_memory", lambda *_, **__: DeviceMemory(16 * GIBIBYTE, 2 * GIBIBYTE))
    with pytest.raises(ConfigError, match=r"weights take 153\d\d MiB, but only 14336 of the GPU's 16384 MiB are free"):
        choices._memory_with_weights(weight_bytes(spec, torch.bfloat16), GPU)
