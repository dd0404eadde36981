"""Llama-8B's shape and one of a few numbers, adapters for its bank, and a driver that copies within host memory."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest
import torch

from rota.engine.lora import copies
from rota.engine.lora.bank import Bank
from rota.engine.lora.host import HostAdapter, run_length
from rota.engine.model.rotary import RotarySpec
from rota.engine.model.sites import SITES, site_shapes
from rota.engine.model.spec import ModelSpec

MAX_RANK = 6
CPU = torch.device("cpu")
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
SMALL = replace(
    LLAMA_8B, vocab_size=32, hidden_size=8, intermediate_size=12, layers=2, heads=2, kv_heads=1, head_dim=4,
    context_length=64, rotary=RotarySpec(10_000.0), attention_scale=0.25, has_tied_embeddings=True, dtype=torch.float32,
)  # fmt: skip


def host_adapter(ranks: tuple[int, ...], fill: float) -> HostAdapter:
    """An adapter of constant weights and one rank per site."""
    run = torch.full((run_length(site_shapes(SMALL), SMALL.layers, ranks),), fill)
    return HostAdapter((run,), ranks, torch.tensor([ranks] * SMALL.layers, dtype=torch.int32))


def memory_moves(to: Any, out_of: Any, sizes: Any, count: Any, *_: Any) -> int:
    """The driver's call, for memory of the host."""
    for target, source, size in zip(to, out_of, sizes, strict=True):
        ctypes.memmove(target, source, size)
    assert len(to) == count.value
    return 0


def copy_within_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batched copies need no device from here on."""
    monkeypatch.setattr(copies, "_driver_call", lambda: memory_moves)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: type("Stream", (), {"cuda_stream": 0}))


def assert_equal(bank: Bank, other: Bank) -> None:
    """Operations find the same in both."""
    for layer in range(bank.layers):
        for site in SITES:
            found, wanted = bank.factors(layer, site), other.factors(layer, site)
            assert torch.equal(found.a, wanted.a)
            assert torch.equal(found.b, wanted.b)
            assert torch.equal(found.ranks, wanted.ranks)
