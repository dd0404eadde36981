"""The rotary table against the cosines and sines transformers computes from the same config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rota.engine.families.table import read_spec
from rota.engine.model.rotary import rotary_table
from rota.engine.model.spec import ModelSpec

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3,
    "llama3, sixteenfold": {**LLAMA3, "factor": 32.0, "high_freq_factor": 8.0},
    "yarn": YARN,
    "yarn, its length left out": {"rope_type": "yarn", "factor": 2.0},
    "yarn, other turns": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, attention factor given": {**YARN, "attention_factor": 0.7},
    "yarn, attention factor from two scales": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
}


def spec_of(folder: Path, **fields: Any) -> ModelSpec:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 8,
        "hidden_size": 256,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 4096,
    }
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    return read_spec(folder)


def table_of_transformers(folder: Path, positions: Tensor) -> Tensor:
    embedding = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(folder))
    cosine, sine = embedding(torch.empty(1), positions[None])
    half = cosine.shape[-1] // 2
    return torch.cat((cosine[0, :, :half], sine[0, :, :half]), dim=1)


@pytest.mark.parametrize("spelling", ["old", "new"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_table_is_that_of_transformers_in_either_spelling(tmp_path, variant, spelling):
    scaling = VARIANTS[variant]
    if spelling == "old":
        fields: dict[str, Any] = {"rope_theta": 500_000.0, "rope_scaling": scaling or None}
    else:
        fields = {"rope_parameters": {"rope_theta": 500_000.0, "rope_type": "default", **scaling}}
    spec = spec_of(tmp_path, **fields)

    found = rotary_table(spec.rotary, spec.head_dim, 4096)

    assert found.dtype is torch.float32
    # Angles of thousands of radians know no more than three digits after the point in float32.
    assert float((found - table_of_transformers(tmp_path, torch.arange(4096))).abs().max()) < 1e-3
    assert float((found[:64] - table_of_transformers(tmp_path, torch.arange(64))).abs().max()) < 1e-5


def test_the_oldest_spelling_calls_the_kind_type(tmp_path):
    spec = spec_of(tmp_path, rope_scaling={"type": "linear", "factor": 2.0})
    assert (spec.rotary.kind, spec.rotary.factor, spec.rotary.theta) == ("linear", 2.0, 10_000.0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_table_is_that_of_transformers_to_the_last_of_128k_positions(tmp_path, variant):
    longest = 131_072
    fields = {"rope_theta": 500_000.0, "rope_scaling": VARIANTS[variant] or None, "max_position_embeddings": longest}
    spec = spec_of(tmp_path, **fields)

    some = torch.cat((torch.arange(0, longest, 997), torch.arange(longest - 4096, longest)))
    found, wanted = rotary_table(spec.rotary, spec.head_dim, longest)[some], table_of_transformers(tmp_path, some)

    # An angle of 131,071 radians is known to 1/128 in float32, and both tables take it from the same product.
    assert float((found - wanted).abs().max()) < 1e-2
