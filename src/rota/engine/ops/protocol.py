"""The Operations protocol is what a model needs between matrix products, whatever version computes it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from rota.engine.layer_cache import LayerCache
from rota.engine.lora.open_product import Output
from rota.engine.step.device_step import DeviceStep


class Operations(Protocol):
    """The small operations between matrix products; what an open product lacks is added before or meanwhile.

    The modules `ops/reference.py` and `ops/fused.py` and the class in `ops/cpu.py` have functions of these names.
    """

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor: ...

    def add_rms_norm(self, x: Output, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); may reuse both inputs' storage."""
        ...

    def silu_multiply(self, gate_up: Output) -> Tensor:
        """[tokens, 2 * width] -> silu(first half) * second half."""
        ...

    def rotate_and_store(
        self,
        qkv: Output,
        rotary: Tensor,
        step: DeviceStep,
        cache: LayerCache,
        norms: tuple[Tensor, Tensor, float] | None,
    ) -> Tensor:
        """Rotate queries and keys, write keys and values into the cache, return the queries.

        qkv [tokens, (heads + 2 * kv_heads) * head_dim]; rotary [positions, head_dim] float32, cosines then sines of
        head_dim / 2 angles each; norms: weights of an RMS norm over each query head and each key head, and their
        epsilon, applied before the rotation. A cache in eight bits gets keys and values rounded. Returns
        [tokens, heads, head_dim].
        """
        ...
