"""Weights are a model's matrices on the device, stacked as the forward pass wants them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from rota.engine.model.linear import Linear, Matrix, Projection, projection
from rota.engine.model.spec import ModelSpec
from rota.engine.model.ways import Ways
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
    # By site, [layers, rows, inputs]: where adapters' A lie below the matrices.
    annexes: Mapping[str, Tensor] = field(default_factory=dict)


# In numbers: a product's rows begin where every kernel reads them at full width.
ALIGNMENT = 64
# Rows to leave below the matrices of these sites.
AnnexRows = Mapping[str, int]
NO_ANNEX: AnnexRows = {}


def weight_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """What the weights of a model take."""
    return _build(spec, torch.device("meta"), dtype, lambda name, target: None).size_bytes


def load_weights(
    folder: Path,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    quiet: bool = False,
    annex: AnnexRows = NO_ANNEX,
) -> Weights:
    """Copy a folder's safetensors to the device; every name and shape is checked before the first copy."""
    with Shards(folder) as shards:
        expected = _build(spec, torch.device("meta"), dtype, shards.check)
        shards.check_all_known()
        with Progress(f"Loading {folder.name}", expected.size_bytes, BYTES, quiet) as progress:

            def fill(name: str, target: Tensor) -> None:
                shards.copy(name, target)
                progress.update(target.nbytes)

            return _build(spec, device, dtype, fill, annex)


def dummy_weights(
    spec: ModelSpec, device: torch.device, dtype: torch.dtype, seed: int = 0, annex: AnnexRows = NO_ANNEX
) -> Weights:
    """Random weights of the model's shape, drawn on the device; activations neither vanish nor explode."""
    generator = torch.Generator(device).manual_seed(seed)

    def fill(name: str, target: Tensor) -> None:
        if name.endswith("norm.weight"):
            target.fill_(1.0)
        else:
            target.normal_(0.0, target.shape[-1] ** -0.5, generator=generator)

    return _build(spec, device, dtype, fill, annex)


class _Builder:
    """Allocates matrices and has them filled, part by part."""

    def __init__(self, device: torch.device, dtype: torch.dtype, fill: Fill, layers: int, annex: AnnexRows) -> None:
        self._device = device
        self._dtype = dtype
        self._fill = fill
        self._layers = layers
        self._annex_rows = annex
        self._blocks: dict[str, Tensor] = {}
        self._ways: dict[tuple[int, ...], Ways] = {}
        self.annexes: dict[str, Tensor] = {}
        self.size_bytes = 0

    def tensor(self, name: str, *shape: int) -> Tensor:
        target = self._empty(shape)
        self._fill(name, target)
        return target

    def stacked(self, names: list[str], outputs: list[int], inputs: int, has_bias: bool) -> Projection:
        """Matrices with the same input, one below the other."""
        weight = self._empty((sum(outputs), inputs))
        self._fill_parts(names, "weight", weight, outputs)
        bias = self._empty((sum(outputs),)) if has_bias else None
        if bias is not None:
            self._fill_parts(names, "bias", bias, outputs)
        return projection(weight, bias, self._ways_of(weight, bias))

    def site(
        self, site: str, layer: int, names: list[str], outputs: list[int], inputs: int, has_bias: bool
    ) -> Projection:
        """The same, with rows for adapters below where the site has an annex."""
        if not self._annex_rows.get(site):
            return self.stacked(names, outputs, inputs, has_bias)
        own, rows = sum(outputs), self._annex_rows[site]
        all_rows = -(-(own + rows) // ALIGNMENT) * ALIGNMENT
        if site not in self._blocks:
            # One block for all layers, so that an adapter's share of all of them is copied at once.
            block = torch.empty(self._layers, all_rows, inputs, dtype=self._dtype, device=self._device)
            block[:, own:].zero_()
            self._blocks[site], self.annexes[site] = block, block[:, own : own + rows]
        weight = self._blocks[site][layer]
        self._fill_parts(names, "weight", weight[:own], outputs)
        bias = torch.zeros(all_rows, dtype=self._dtype, device=self._device) if has_bias else None
        if bias is not None:
            self._fill_parts(names, "bias", bias[:own], outputs)
        own_bias = None if bias is None else bias[:own]
        self.size_bytes += weight[:own].nbytes + (0 if own_bias is None else own_bias.nbytes)
        annex = Matrix(weight, bias, self._ways_of(weight, bias))
        return Linear(weight[:own], own_bias, self._ways_of(weight[:own], own_bias), annex)

    def _ways_of(self, weight: Tensor, bias: Tensor | None) -> Ways | None:
        """The same for all matrices of a shape; a CPU has one way, and so has a matrix with a bias."""
        if self._device.type != "cuda" or bias is not None:
            return None
        if weight.shape not in self._ways:
            self._ways[weight.shape] = Ways(weight.shape[0], weight.dtype, weight.device)
        return self._ways[weight.shape]

    def _fill_parts(self, names: list[str], what: str, target: Tensor, outputs: list[int]) -> None:
        for name, part in zip(names, torch.split(target, outputs), strict=True):
            self._fill(f"{name}.{what}", part)

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        self.size_bytes += tensor.nbytes
        return tensor


def _build(
    spec: ModelSpec, device: torch.device, dtype: torch.dtype, fill: Fill, annex: AnnexRows = NO_ANNEX
) -> Weights:
    builder = _Builder(device, dtype, fill, spec.layers, annex)
    embedding = builder.tensor("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
    layers = tuple(_build_layer(spec, builder, index) for index in range(spec.layers))
    norm = builder.tensor("model.norm.weight", spec.hidden_size)
    if not spec.has_tied_embeddings:
        head = builder.stacked(["lm_head"], [spec.vocab_size], spec.hidden_size, has_bias=False)
        return Weights(embedding, layers, norm, head, builder.size_bytes, builder.annexes)
    head = projection(embedding)
    copied = 0 if head.weight is embedding else embedding.nbytes
    return Weights(embedding, layers, norm, head, builder.size_bytes + copied, builder.annexes)


def _build_layer(spec: ModelSpec, builder: _Builder, index: int) -> LayerWeights:
    layer = f"model.layers.{index}"
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
        qkv=builder.site(
            "qkv",
            index,
            [f"{attention}.{name}_proj" for name in "qkv"],
            [queries, keys, keys],
            hidden,
            spec.has_qkv_bias,
        ),
        head_norms=head_norms,
        output=builder.site("o", index, [f"{attention}.o_proj"], [hidden], queries, spec.has_output_bias),
        mlp_norm=builder.tensor(f"{layer}.post_attention_layernorm.weight", hidden),
        gate_up=builder.site(
            "gate_up", index, [f"{mlp}.gate_proj", f"{mlp}.up_proj"], [inner, inner], hidden, spec.has_mlp_bias
        ),
        down=builder.site("down", index, [f"{mlp}.down_proj"], [hidden], inner, spec.has_mlp_bias),
    )
