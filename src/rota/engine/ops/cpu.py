"""The CPU family of operations spends few calls into torch, since on small models each costs as much as its work."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rota.engine.ops import reference
from rota.engine.step.device_step import DeviceStep


@dataclass(frozen=True, slots=True)
class _Turn:
    """What all layers of a step share: where its tokens turn to, and where their keys and values go."""

    step: DeviceStep
    cosine: Tensor  # [tokens, 1, 2, head_dim / 2], the model's dtype, both halves alike
    sine: Tensor  # the same, its first half negative
    places: Tensor  # [tokens * kv_heads], lines of head_dim numbers in the cache


class CPUOperations:
    """One model's operations; the newest step is known by identity, so its tensors must not change under way."""

    def __init__(self) -> None:
        self._turn: _Turn | None = None
        # By the identity of a weight: the weight, so that no other takes its place, and twice the weight.
        self._doubled: dict[int, tuple[Tensor, Tensor]] = {}

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """torch's is nine operations on a CPU; a layer norm is one, and the same of (x, -x), whose mean is nought."""
        if id(weight) not in self._doubled:
            self._doubled[id(weight)] = (weight, torch.cat((weight, weight)))
        _, doubled = self._doubled[id(weight)]
        normed = functional.layer_norm(torch.cat((x, -x), 1), doubled.shape, doubled, None, epsilon)
        return normed[:, : len(weight)].contiguous()

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        residual.add_(x)
        return self.rms_norm(residual, weight, epsilon), residual

    def silu_multiply(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    def rotate_and_store(
        self,
        qkv: Tensor,
        rotary: Tensor,
        step: DeviceStep,
        keys: Tensor,
        values: Tensor,
        norms: tuple[Tensor, Tensor, float] | None,
    ) -> Tensor:
        kv_heads, _, head_dim = keys.shape[1:]
        turn = self._turn
        if turn is None or turn.step is not step:
            turn = self._turn = _turn(step, rotary, keys, qkv.dtype)
        heads = qkv.view(qkv.shape[0], -1, 2, head_dim // 2)
        turned, value = heads[:, :-kv_heads], heads[:, -kv_heads:]
        if norms is not None:
            turned = _normed(turned.flatten(2), kv_heads, norms).view(turned.shape)
        # (a, b) turned is (a, b) · cosine + (b, a) · (-sine, sine).
        rotated = torch.addcmul(turned * turn.cosine, turned.flip(2), turn.sine).flatten(2)
        # What the model makes by itself is finite: its weights are, and these precisions reach far enough.
        is_finite = step.lora is None and qkv.dtype is not torch.float16
        for cache, new in ((keys, rotated[:, -kv_heads:]), (values, value)):
            stored = new if is_finite else reference.storable(new)
            cache.view(-1, head_dim).index_copy_(0, turn.places, stored.reshape(-1, head_dim))
        return rotated[:, :-kv_heads]


def _turn(step: DeviceStep, rotary: Tensor, keys: Tensor, dtype: torch.dtype) -> _Turn:
    kv_heads, block_size, head_dim = keys.shape[1:]
    cosine, sine = rotary[step.positions].to(dtype).view(-1, 1, 2, head_dim // 2).chunk(2, dim=2)
    blocks, offsets = step.addresses[:, None] // block_size, step.addresses[:, None] % block_size
    places = (blocks * kv_heads + torch.arange(kv_heads)) * block_size + offsets
    return _Turn(step, torch.cat((cosine, cosine), 2), torch.cat((-sine, sine), 2), places.flatten())


def _normed(heads: Tensor, kv_heads: int, norms: tuple[Tensor, Tensor, float]) -> Tensor:
    query_norm, key_norm, epsilon = norms
    query, key = heads[:, :-kv_heads], heads[:, -kv_heads:]
    return torch.cat(
        (reference.rms_norm(query, query_norm, epsilon), reference.rms_norm(key, key_norm, epsilon)), dim=1
    )
