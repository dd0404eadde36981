"""Floors say how fast a step could be: the bytes each kind of kernel must move, and the operations a step must do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rota.engine.model.sites import site_shapes
from rota.engine.model.spec import ModelSpec

from .kinds import KINDS, Kind

# Measured ceilings of an H200: read plus written on the device, and bf16 matrix products.
BYTES_PER_S = 4.2e12
FLOPS = 781e12
SIZE = 2  # bytes of a bf16 number
BF16 = KINDS["bf16"]


@dataclass(frozen=True, slots=True)
class Load:
    """What is in a step: tokens computed, how many of them sample, tokens attended to, and adapters of one rank."""

    tokens: int
    sampled: int
    context_tokens: int
    adapters: int
    rank: int


def floor_bytes(spec: ModelSpec, load: Load, kind: Kind = BF16) -> dict[str, float]:
    """Bytes by kernel family; every input is read once, every output written once. The head has 16 bits always."""
    tokens, layers, hidden, inner = load.tokens, spec.layers, spec.hidden_size, spec.intermediate_size
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    sites = site_shapes(spec)
    inputs, outputs = (sum(getattr(site, side) for site in sites) for side in ("inputs", "outputs"))
    has_adapters = float(load.adapters > 0)
    a_numbers = load.adapters * load.rank * sum(site.inputs * len(site.parts) for site in sites)
    b_numbers = load.adapters * load.rank * sum(site.outputs for site in sites)
    adapted = has_adapters * tokens
    return {
        "gemm": layers * (kind.weight_size * (layer_numbers(spec) + tokens * inputs) + SIZE * tokens * outputs)
        + SIZE * spec.vocab_size * (hidden + load.sampled),
        "attention": layers * (kind.kv_size * 2 * keys * load.context_tokens + SIZE * 2 * queries * tokens),
        "lora shrink": SIZE * layers * (a_numbers + adapted * inputs),
        "lora expand": SIZE * layers * (b_numbers + 2 * adapted * outputs),
        "norm": SIZE * tokens * hidden * (8 * layers + 2),
        "rope and store": SIZE * layers * tokens * 2 * (queries + 2 * keys),
        "silu": SIZE * layers * tokens * 3 * inner,
        "sampling": 4.0 * load.sampled * spec.vocab_size,
    }


def floor_flops(spec: ModelSpec, load: Load, prompts: Sequence[int]) -> float:
    """Operations of a step that computes whole prompts of these lengths and nothing else."""
    pairs = sum(length * (length + 1) / 2 for length in prompts)
    attention = 4.0 * pairs * spec.heads * spec.head_dim * spec.layers
    head = 2.0 * load.sampled * spec.vocab_size * spec.hidden_size
    ranks = sum(site.inputs * len(site.parts) + site.outputs for site in site_shapes(spec)) * load.rank
    lora = 2.0 * load.tokens * ranks * spec.layers if load.adapters else 0.0
    return 2.0 * load.tokens * layer_numbers(spec) * spec.layers + attention + head + lora


def layer_numbers(spec: ModelSpec) -> int:
    """Numbers in the matrices of one layer."""
    return sum(site.inputs * site.outputs for site in site_shapes(spec))
