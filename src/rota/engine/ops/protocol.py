"""The Operations protocol is what a model needs between matrix products, whatever version computes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from rota.engine.layer_cache import LayerCache
from rota.engine.lora.deferred import Output
from rota.engine.step.device_step import DeviceStep

# ── open sites ──────────────────────────────────────────────────────────────────────────────────────────────────────
# The sites whose products stay open: the operation that follows adds the adapters' part.
#
#     gate_up    silu · up                       o, down    residual and norm (a program reads all of a row's B)
#     qkv        rotation and KV write
#
# On an H200 all four save 0.4 ms of a step of 64 with six adapters; of a step of 384, o and down save nothing
# (`benchmarks/open_sites.py`, decision 0023). In steps with a prompt gate_up alone stays open: beside a product of
# 2,048 tokens that is one time less of writing and reading 117 MB. Steps without adapters are not concerned.

# By site, the most tokens of a step that only decodes.
OPEN_SITES: Mapping[str, int] = {"gate_up": 512, "qkv": 512, "o": 128, "down": 128}
# In steps with a prompt, of any number of tokens.
OPEN_BESIDE_PROMPTS = frozenset({"gate_up"})


class Operations(Protocol):
    """The small operations between matrix products; what an open product lacks is added before or meanwhile.

    The module `ops/reference.py` and the classes in `ops/cpu.py` and `ops/fused.py` have functions of these names.
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
