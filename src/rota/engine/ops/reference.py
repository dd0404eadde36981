"""Operations are what a model needs between matrix products: here in plain torch, the reference of other versions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rota.engine.layer_cache import LayerCache, in_eight_bits_together, writable
from rota.engine.lora.deferred import Output, closed
from rota.engine.step.device_step import DeviceStep

# Far beyond any key or value of a working model, and small enough for products and sums in float32.
LARGEST_STORED = 1e30

# Weights of the norm over each query head and of the norm over each key head, and their epsilon.
HeadNorms = tuple[Tensor, Tensor, float]


class Operations:
    """The small operations between matrix products; what an open product lacks is added before or meanwhile.

    This version is plain torch without state; the versions that inherit from it are tested against it.
    """

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """[tokens, width] -> the same shape, each token divided by its root mean square, times the weight."""
        if weight.dtype is not x.dtype:  # kept more precisely than the model computes
            return functional.rms_norm(x.float(), weight.shape, weight.float(), epsilon).to(x.dtype)
        return functional.rms_norm(x, weight.shape, weight, epsilon)

    def add_rms_norm(self, x: Output, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); may reuse both inputs' storage."""
        total = closed(x) + residual
        return self.rms_norm(total, weight, epsilon), total

    def silu_multiply(self, gate_up: Output) -> Tensor:
        """[tokens, 2 * width] -> silu(first half) * second half."""
        gate, up = closed(gate_up).chunk(2, dim=-1)
        return functional.silu(gate) * up

    def rotate_and_store(
        self, qkv: Output, rotary: Tensor, step: DeviceStep, cache: LayerCache, norms: HeadNorms | None
    ) -> Tensor:
        """Rotate queries and keys, write keys and values into the cache, return the queries.

        qkv [tokens, (heads + 2 * kv_heads) * head_dim]; rotary [positions, head_dim] float32, cosines then sines of
        head_dim / 2 angles each; norms: applied before the rotation. A cache in eight bits gets keys and values
        rounded. Returns [tokens, heads, head_dim].
        """
        kv_heads, block_size, head_dim = cache.keys.shape[1:]
        heads = closed(qkv).unflatten(1, (-1, head_dim))
        query, key, value = torch.split(heads, [heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
        if norms is not None:
            query_norm, key_norm, epsilon = norms
            query, key = self.rms_norm(query, query_norm, epsilon), self.rms_norm(key, key_norm, epsilon)
        cosine, sine = rotary[step.positions].unsqueeze(1).chunk(2, dim=-1)  # [tokens, 1, head_dim / 2]
        blocks, offsets = step.addresses // block_size, step.addresses % block_size
        key, value = storable(_rotate(key, cosine, sine)), storable(value)
        if cache.scales is not None:
            key, value, cache.scales[blocks, :, offsets] = in_eight_bits_together(key, value)
        writable(cache.keys)[blocks, :, offsets] = writable(key)
        writable(cache.values)[blocks, :, offsets] = writable(value)
        return _rotate(query, cosine, sine)


def storable(x: Tensor) -> Tensor:
    """A finite copy with finite products: the attention of other sequences reads it too, and hides it by a mask.

    An adapter may turn finite weights into infinities. They ruin its own answers. Without this copy they would also
    ruin sequences that share a page or a call with it, since no mask hides a NaN.
    """
    most = min(LARGEST_STORED, torch.finfo(x.dtype).max)
    return x.clamp(-most, most).nan_to_num_(0.0)


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + head_dim / 2]) by their angles, in float32."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x.dtype)
