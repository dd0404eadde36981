"""Weights are a model's matrices on the device, stacked as the forward pass wants them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rota.engine.model.linear import Projection, projection
from rota.engine.model.spec import ModelSpec
from rota.engine.progress import BYTES, Progress
from rota.engine.shards import Shards

# Writes the tensor of a name into the part of a matrix that waits for it.
Fill = Callable[[str, Tensor], None]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, in the order it is used."""

    attention_norm: Tensor
    qkv: Projection  # queries, keys and values of all heads, one below the other
    head_norms: tuple[Tensor, Tensor] | None  # Qwen3's, of queries and keys
    output: Projection
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection


@dataclass(frozen=True, slots=True)
class Weights:
    """A whole model; there is no half one."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Projection
    size_bytes: int


def load_weights(
    folder: Path, spec: ModelSpec, device: torch.device, dtype: torch.dtype, quiet: bool = False
) -> Weights:
    """Copy a folder's safetensors to the device; every name and shape is checked before the first copy."""
    with Shards(folder) as shards:
        expected = _build(spec, torch.device("meta"), dtype, shards.check)
        shards.check_all_known()
        with Progress(f"Loading {folder.name}", expected.size_bytes, BYTES, quiet) as progress:

            def fill(name: str, target: Tensor) -> None:
                shards.copy(name, target)
                progress.update(target.nbytes)

            return _build(spec, device, dtype, fill)


def dummy_weights(spec: ModelSpec, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Weights:
    """Random weights of the model's shape, drawn on the device; activations neither vanish nor explode."""
    generator = torch.Generator(device).manual_seed(seed)

    def fill(name: str, target: Tensor) -> None:
        if name.endswith("norm.weight"):
            target.fill_(1.0)
        else:
            target.normal_(0.0, target.shape[-1] ** -0.5, generator=generator)

    return _build(spec, device, dtype, fill)


class _Builder:
    """Allocates matrices and has them filled, part by part."""

    def __init__(self, device: torch.device, dtype: torch.dtype, fill: Fill) -> None:
        self._device = device
        self._dtype = dtype
        self._fill = fill
        self.size_bytes = 0

    def tensor(self, name: str, *shape: int) -> Tensor:
        target = self._empty(shape)
        self._fill(name, target)
        return target

    def stacked(self, names: list[str], outputs: list[int], inputs: int, has_bias: bool) -> Projection:
        """Matrices with the same input, one below the other."""
        weight = self._empty((sum(outputs), inputs))
        for name, part in zip(names, torch.split(weight, outputs), strict=True):
            self._fill(f"{name}.weight", part)
        if not has_bias:
            return projection(weight)
        bias = self._empty((sum(outputs),))
        for name, part in zip(names, torch.split(bias, outputs), strict=True):
            self._fill(f"{name}.bias", part)
        return projection(weight, bias)

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        self.size_bytes += tensor.nbytes
        return tensor


def _build(spec: ModelSpec, device: torch.device, dtype: torch.dtype, fill: Fill) -> Weights:
    builder = _Builder(device, dtype, fill)
    embedding = builder.tensor("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
    layers = tuple(_build_layer(spec, builder, f"model.layers.{index}") for index in range(spec.layers))
    norm = builder.tensor("model.norm.weight", spec.hidden_size)
    if not spec.has_tied_embeddings:
        head = builder.stacked(["lm_head"], [spec.vocab_size], spec.hidden_size, has_bias=False)
        return Weights(embedding, layers, norm, head, builder.size_bytes)
    head = projection(embedding)
    copied = 0 if head.weight is embedding else embedding.nbytes
    return Weights(embedding, layers, norm, head, builder.size_bytes + copied)


def _build_layer(spec: ModelSpec, builder: _Builder, layer: str) -> LayerWeights:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    head_norms = None
    if spec.has_head_norms:
        head_norms = (
            builder.tensor(f"{attention}.q_norm.weight", spec.head_dim),
            builder.tensor(f"{attention}.k_norm.weight", spec.head_dim),
        )
    return LayerWeights(
        attention_norm=builder.tensor(f"{layer}.input_layernorm.weight", hidden),
        qkv=builder.stacked(
            [f"{attention}.{name}_proj" for name in "qkv"], [queries, keys, keys], hidden, spec.has_qkv_bias
        ),
        head_norms=head_norms,
        output=builder.stacked([f"{attention}.o_proj"], [hidden], queries, spec.has_output_bias),
        mlp_norm=builder.tensor(f"{layer}.post_attention_layernorm.weight", hidden),
        gate_up=builder.stacked([f"{mlp}.gate_proj", f"{mlp}.up_proj"], [inner, inner], hidden, spec.has_mlp_bias),
        down=builder.stacked([f"{mlp}.down_proj"], [hidden], inner, spec.has_mlp_bias),
    )
