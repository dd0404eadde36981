"""Kinds of engines by the bits of their weights and of their KV."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What an engine is configured with, and the bytes of a number."""

    model: dict[str, Any] = field(default_factory=dict)
    cache: dict[str, Any] = field(default_factory=dict)
    weight_size: int = 2
    kv_size: int = 2


FP8 = {"quantization": "fp8"}
KINDS = {
    "bf16": Kind(),
    "fp8": Kind(model=FP8, weight_size=1),
    "fp8+kv": Kind(model=FP8, cache={"kv_cache_dtype": "fp8"}, weight_size=1, kv_size=1),
}
