"""What a model asks of attention, whichever twin computes it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from rota.engine.layer_cache import LayerCache
from rota.engine.step.device_step import DeviceStep


class Attention(Protocol):
    """Attention over the paged cache; keys and values of the step's own tokens are already written.

    query [tokens, heads, head_dim]; returns its shape and precision.
    `window` is a layer's: how many tokens a query sees at most, its own included; 0: all before it. What lies before
    every query's window is not read.
    """

    def decode(self, query: Tensor, cache: LayerCache, step: DeviceStep, window: int = 0) -> Tensor: ...

    def prefill(self, query: Tensor, cache: LayerCache, step: DeviceStep, window: int = 0) -> Tensor: ...
