"""What a model asks of attention, whichever twin computes it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from rota.engine.step.device_step import DeviceStep


class Attention(Protocol):
    """Attention over the paged cache; keys and values of the step's own tokens are already written.

    query [tokens, heads, head_dim]; keys, values [blocks, kv_heads, block_size, head_dim]; returns query's shape.
    """

    def decode(self, query: Tensor, keys: Tensor, values: Tensor, step: DeviceStep) -> Tensor: ...

    def prefill(self, query: Tensor, keys: Tensor, values: Tensor, step: DeviceStep) -> Tensor: ...
