"""A light model is one whose layers are computed sooner than they are launched: its steps are all graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rota.core.config import EngineConfig, ModelConfig
from rota.engine.choices import choose
from rota.engine.weights.makers import EightBitFloats
from tests.engine.lora.llama import LLAMA_8B
from tests.engine.model_factory import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, "llama3")
    return folder


@pytest.mark.parametrize(
    ("hidden", "inner", "maker", "is_light"),
    [
        (4096, 14336, None, False),
        (4096, 14336, EightBitFloats(), True),
        (5120, 25600, EightBitFloats(), False),
        (2048, 8192, None, True),
    ],
)
def test_what_a_layer_takes_decides(
    folder: Path, hidden: int, inner: int, maker: EightBitFloats | None, is_light: bool
):
    chosen = choose(EngineConfig(model=ModelConfig(model_path=str(folder), device="cpu"), quiet=True))
    heads = hidden // LLAMA_8B.head_dim
    spec = replace(LLAMA_8B, hidden_size=hidden, intermediate_size=inner, heads=heads)
    assert replace(chosen, spec=spec, dtype=torch.bfloat16, maker=maker).is_light is is_light
