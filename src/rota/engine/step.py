"""A step as the device sees it: a plan's rows turned into tensors.

Tokens of one step lie in one line, decodes first, then chunks one after the other:

    tokens   d0 d1 d2 | c0 c0 c0 c0 | c1 c1
    rows      7  2  5 |      9      |   4
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rota.engine.lora.layout import LoraBatch


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """The chunks of a step; their keys and values, cached prefix included, are read from the paged cache."""

    rows: Tensor  # [chunks] int32
    starts: Tensor  # [chunks] int32, tokens already in the cache before the chunk
    offsets: Tensor  # [chunks + 1] int32, where each chunk begins among the prefill tokens
    longest: int  # tokens of the longest chunk
    # The same three on the host, for code that loops over chunks.
    host_rows: tuple[int, ...]
    host_starts: tuple[int, ...]
    host_lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChunkInputs:
    """The chunks' share of a step, decodes not counted."""

    token_ids: Tensor  # [tokens] int32
    positions: Tensor  # [tokens] int32
    token_rows: Tensor  # [tokens] int32, each token's row
    last: Tensor  # [sampled] int32, among all tokens of the step those of chunks whose logits are wanted
    part: PrefillPart


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """Everything a forward pass needs besides weights and cache."""

    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    slots: Tensor  # [tokens] int64, where a token's key and value go: block * block_size + offset
    tables: Tensor  # [rows + 1, pages] int32, the page table of every row; the last row is padding's
    decode_rows: Tensor  # [decodes] int32
    decode_lengths: Tensor  # [decodes] int32, tokens attended to, the new one included
    longest_decode: int  # an upper bound of decode_lengths known on the host
    prefill: PrefillPart | None = None
    lora: LoraBatch | None = None  # None where every token is the base model's

    @property
    def decodes(self) -> int:
        return self.decode_rows.shape[0]


class Attention(Protocol):
    """Attention over the paged cache; keys and values of the step's own tokens are already written.

    query [tokens, heads, head_dim]; keys, values [blocks, kv_heads, block_size, head_dim]; returns query's shape.
    """

    def decode(self, query: Tensor, keys: Tensor, values: Tensor, step: DeviceStep) -> Tensor: ...

    def prefill(self, query: Tensor, keys: Tensor, values: Tensor, step: DeviceStep) -> Tensor: ...


class Operations(Protocol):
    """The small operations between matrix products, as a plain and a fused family.

    `ops/reference.py` and `ops/fused.py` each provide these functions under these names.
    """

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); may reuse both inputs' storage."""
        ...

    def silu_multiply(self, gate_up: Tensor) -> Tensor:
        """[tokens, 2 * width] -> silu(first half) * second half."""
        ...

    def rotate_and_store(
        self,
        qkv: Tensor,
        rotary: Tensor,
        step: DeviceStep,
        keys: Tensor,
        values: Tensor,
        norms: tuple[Tensor, Tensor, float] | None,
    ) -> Tensor:
        """Rotate queries and keys, write keys and values into the cache, return the queries.

        qkv [tokens, (heads + 2 * kv_heads) * head_dim]; rotary [positions, head_dim] float32, cosines then sines of
        head_dim / 2 angles each; norms: Qwen3's per-head RMS norm weights of q and k and their epsilon, applied
        before rotating. Returns [tokens, heads, head_dim].
        """
        ...


def int32(values: list[int] | tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
