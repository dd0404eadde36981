"""Llama-8B's shape, for what is decided by sizes alone."""

from __future__ import annotations

import torch

from rota.engine.model.rotary import RotarySpec
from rota.engine.model.spec import ModelSpec

LLAMA_8B = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    norm_epsilon=1e-5,
    context_length=131_072,
    rotary=RotarySpec(500_000.0),
    has_qkv_bias=False,
    has_output_bias=False,
    has_mlp_bias=False,
    layer_norms=(),
    attention_scale=128**-0.5,
    has_tied_embeddings=False,
    dtype=torch.bfloat16,
    eos_token_ids=(),
)
