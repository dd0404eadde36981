"""The CPU version of the operations makes few calls into torch: on small models a call costs as much as its work."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rota.engine.layer_cache import LayerCache, in_eight_bits_together, writable
from rota.engine.lora.deferred import Output, closed
from rota.engine.ops.reference import HeadNorms, Operations, storable
from rota.engine.step.device_step import DeviceStep


@dataclass(frozen=True, slots=True)
class _StepRotation:
    """What all layers of a step share: the rotation of its tokens, and where their keys and values are stored."""

    cosine: Tensor  # [tokens, 1, 2, head_dim / 2], the model's dtype, both halves alike
    sine: Tensor  # the same shape, its first half negative
    places: Tensor  # [tokens * kv_heads], in the cache as lines of head_dim numbers


class CPUOperations(Operations):
    """One model's operations; the newest step is known by identity, so its tensors must not change meanwhile."""

    def __init__(self) -> None:
        self._step: DeviceStep | None = None
        self._rotations: dict[int, _StepRotation] = {}  # by a rotary table's id(): layers may have different tables
        # By a weight's id(): the weight, so that no other object gets its id, and the weight twice.
        self._doubled: dict[int, tuple[Tensor, Tensor]] = {}

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """As the layer norm of (x, -x), whose mean is zero: one operation on a CPU, where torch's RMS norm is nine."""
        if id(weight) not in self._doubled:
            self._doubled[id(weight)] = (weight, torch.cat((weight, weight)))
        _, doubled = self._doubled[id(weight)]
        normed = functional.layer_norm(torch.cat((x, -x), 1), doubled.shape, doubled, None, epsilon)
        return normed[:, : len(weight)].contiguous()

    def add_rms_norm(self, x: Output, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        residual.add_(closed(x))
        return self.rms_norm(residual, weight, epsilon), residual

    def silu_multiply(self, gate_up: Output) -> Tensor:
        gate, up = closed(gate_up).chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    def rotate_and_store(
        self, qkv: Output, rotary: Tensor, step: DeviceStep, cache: LayerCache, norms: HeadNorms | None
    ) -> Tensor:
        qkv, (kv_heads, _, head_dim) = closed(qkv), cache.keys.shape[1:]
        if self._step is not step:
            self._step, self._rotations = step, {}
        rotation = self._rotations.get(id(rotary))
        if rotation is None:
            rotation = self._rotations[id(rotary)] = _step_rotation(step, rotary, cache.keys, qkv.dtype)
        heads = qkv.view(qkv.shape[0], -1, 2, head_dim // 2)
        query_key, value = heads[:, :-kv_heads], heads[:, -kv_heads:]
        if norms is not None:
            query_key = self._normed(query_key.flatten(2), kv_heads, norms).view(query_key.shape)
        # (a, b) rotated is (a, b) · cosine + (b, a) · (-sine, sine).
        rotated = torch.addcmul(query_key * rotation.cosine, query_key.flip(2), rotation.sine).flatten(2)
        # Without adapters the values are finite: the weights are, and these precisions have the range.
        is_finite = step.lora is None and qkv.dtype is not torch.float16
        key, value = rotated[:, -kv_heads:], value.flatten(2)
        if not is_finite:
            key, value = storable(key), storable(value)
        if cache.scales is not None:
            key, value, scales = in_eight_bits_together(key, value)
            cache.scales.view(-1, 2).index_copy_(0, rotation.places, scales.flatten(0, 1))
        for part, new in ((cache.keys, key), (cache.values, value)):
            lines, stored = writable(part).view(-1, head_dim), writable(new).reshape(-1, head_dim)
            lines.index_copy_(0, rotation.places, stored)
        return rotated[:, :-kv_heads]

    def _normed(self, heads: Tensor, kv_heads: int, norms: HeadNorms) -> Tensor:
        query_norm, key_norm, epsilon = norms
        query, key = heads[:, :-kv_heads], heads[:, -kv_heads:]
        return torch.cat(
            (super().rms_norm(query, query_norm, epsilon), super().rms_norm(key, key_norm, epsilon)), dim=1
        )


def _step_rotation(step: DeviceStep, rotary: Tensor, keys: Tensor, dtype: torch.dtype) -> _StepRotation:
    kv_heads, block_size, head_dim = keys.shape[1:]
    cosine, sine = rotary[step.positions].to(dtype).view(-1, 1, 2, head_dim // 2).chunk(2, dim=2)
    blocks, offsets = step.addresses[:, None] // block_size, step.addresses[:, None] % block_size
    places = (blocks * kv_heads + torch.arange(kv_heads)) * block_size + offsets
    return _StepRotation(torch.cat((cosine, cosine), 2), torch.cat((-sine, sine), 2), places.flatten())
