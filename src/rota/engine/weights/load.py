"""Weights are a model's matrices on the device, stacked as the forward pass needs them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from rota.engine.model.gemm_choice import GemmChoice
from rota.engine.model.linear import Linear, Matrix, Projection, projection
from rota.engine.model.sites import SiteShape, module_name, site_shapes
from rota.engine.model.spec import ModelSpec
from rota.engine.parallel.shard import WHOLE, Cut, Shard
from rota.engine.progress import BYTES, Progress
from rota.engine.quantised.maker import CutOf, Find, MatrixMaker, Parts, StoredMatrix, nothing_stored, uncut
from rota.engine.weights.finite import FiniteCheck
from rota.engine.weights.layouts.layout import WEIGHT, Layout, StoredTensors, window_of
from rota.engine.weights.layouts.table import read_layout
from rota.engine.weights.read_ahead import (
    USUAL_SETUP,
    CopierFor,
    Copy,
    RingSetup,
    WeightRing,
    pinned_on_gpu,
)
from rota.engine.weights.shards import DTYPES, FileRange, Shards
from rota.start import START

# ── matrices ────────────────────────────────────────────────────────────────────────────────────────────────────────
# Matrices are allocated as the forward pass needs them, and a `Fill` writes their numbers part by part.

# Writes the tensor of this name into a part of a matrix.
Fill = Callable[[str, Tensor], None]
# By site: how many rows below its matrices are for adapters.
FusedRows = Mapping[str, int]
NO_FUSED_ROWS: FusedRows = {}
# In elements: a product's rows begin where every kernel can read at full width.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class MatrixSource:
    """Where the numbers of a model's matrices, or of a rank's parts of them, come from."""

    fill: Fill
    find: Find = nothing_stored
    cut_of: CutOf = uncut


def weight_names(site: SiteShape, layer: int) -> list[str]:
    """The names of the weights of a site's parts."""
    return [f"{module_name(layer, part)}.weight" for part, _ in site.parts]


class MatrixBuilder:
    """Makes a model's matrices, by a maker if there is one, and counts their bytes, without those of fused LoRA A."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        source: MatrixSource,
        layers: int,
        fused: FusedRows,
        maker: MatrixMaker | None = None,
    ) -> None:
        self._device = device
        self._dtype = dtype
        self._source = source
        self._layers = layers
        self._fused_rows = fused
        self._maker = maker
        self._blocks: dict[str, Tensor] = {}
        self._gemms: dict[tuple[int, ...], GemmChoice] = {}
        self.fused_lora_a: dict[str, Tensor] = {}  # by site, [layers, rows, inputs]: the adapters' rows
        self.size_bytes = 0

    def tensor(self, name: str, *shape: int) -> Tensor:
        target = self._read(name, *shape)
        self.size_bytes += target.nbytes
        return target

    def site(self, shape: SiteShape, layer: int) -> Projection:
        """The matrices of a site's parts, one below the other, and below them the rows of a fused LoRA A."""
        names = weight_names(shape, layer)
        if self._maker is not None and self._maker.fits(names, shape.outputs, shape.inputs):
            return self._counted(self._made(self._maker, names, shape, layer))
        rows = self._fused_rows.get(shape.name, 0)
        weight = self._block(shape, rows)[layer] if rows else self._empty(shape.outputs, shape.inputs)
        # The bias is zero at the adapters' rows.
        bias = torch.zeros(len(weight), dtype=self._dtype, device=self._device) if shape.has_bias else None
        own, own_bias = weight[: shape.outputs], None if bias is None else bias[: shape.outputs]
        self._fill_parts(shape, layer, "weight", own)
        if own_bias is not None:
            self._fill_parts(shape, layer, "bias", own_bias)
        if not rows:
            return self._counted(projection(own, own_bias, self._gemm_for(own, own_bias)))
        widened = Matrix(weight, bias, self._gemm_for(weight, bias))
        return self._counted(Linear(own, own_bias, self._gemm_for(own, own_bias), widened))

    def head(self, name: str, *shape: int) -> Projection:
        """The matrix that turns hidden states into logits."""
        return self._counted(self._head(name, self._read(name, *shape), self._source.cut_of(name)))

    def tied_head(self, name: str, rows: Tensor, cut: Cut) -> Projection:
        """These rows of the embedding as head; their bytes are already counted."""
        made = self._counted(self._head(name, rows, cut))
        self.size_bytes -= rows.nbytes if made.keeps_weight else 0
        return made

    def _head(self, name: str, weight: Tensor, cut: Cut | None) -> Projection:
        if self._maker is not None and self._maker.fits([name], *weight.shape):
            return self._maker.head(name, weight, cut)
        return projection(weight)

    def _made(self, maker: MatrixMaker, names: Sequence[str], shape: SiteShape, layer: int) -> Projection:
        def weight() -> Tensor:
            return self._fill_parts(shape, layer, "weight", self._empty(shape.outputs, shape.inputs))

        bias = self._fill_parts(shape, layer, "bias", self._empty(shape.outputs)) if shape.has_bias else None
        source = self._source
        return maker.site(Parts(names=names, bias=bias, weight=weight, cut_of=source.cut_of, find=source.find))

    def _counted(self, made: Projection) -> Projection:
        self.size_bytes += made.size_bytes
        return made

    def _block(self, shape: SiteShape, rows: int) -> Tensor:
        """One tensor for all layers, so that an adapter's rows are copied at once; zeros below the model's rows."""
        if shape.name not in self._blocks:
            all_rows = -(-(shape.outputs + rows) // ALIGNMENT) * ALIGNMENT
            block = self._blocks[shape.name] = self._empty(self._layers, all_rows, shape.inputs)
            block[:, shape.outputs :].zero_()
            self.fused_lora_a[shape.name] = block[:, shape.outputs : shape.outputs + rows]
        return self._blocks[shape.name]

    def _fill_parts(self, shape: SiteShape, layer: int, what: str, target: Tensor) -> Tensor:
        for (name, _), part in zip(shape.parts, torch.split(target, list(shape.widths)), strict=True):
            self._source.fill(f"{module_name(layer, name)}.{what}", part)
        return target

    def _gemm_for(self, weight: Tensor, bias: Tensor | None) -> GemmChoice | None:
        """One for all matrices of a shape; None on a CPU, and for a matrix with a bias."""
        if self._device.type != "cuda" or bias is not None:
            return None
        if weight.shape not in self._gemms:
            self._gemms[weight.shape] = GemmChoice(weight.shape[0], weight.dtype, weight.device)
        return self._gemms[weight.shape]

    def _read(self, name: str, *shape: int) -> Tensor:
        target = self._empty(*shape)
        self._source.fill(name, target)
        return target

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)


# What is built here has shapes and no numbers.
META = torch.device("meta")

# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# Reading is the source of matrices while a folder is loaded: it copies, dequantises where need be, and counts.


class WeightLoad:
    """One load of a rank's part of a model. A folder without a layout stores all matrices plain."""

    def __init__(
        self,
        shards: Shards,
        layout: Layout | None,
        spec: ModelSpec,
        shard: Shard,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._shards = shards
        self._layout = layout
        self._spec = spec
        self._shard = shard
        self._device = device
        self._dtype = dtype
        self._shapes: dict[str, tuple[int, int]] = {}
        self._finite = FiniteCheck()

    def check(self) -> None:
        """Raise unless the folder has all tensors of the model and no others, in shapes and kinds that are right."""
        _build(self._spec, META, self._dtype, MatrixSource(self._check))
        for name in self._shapes:
            # Old GPTQ folders have a bias of zeros for every matrix, also where the model has none.
            self._shards.pass_over_zeros(f"{name.removesuffix(WEIGHT)}.bias")
        self._shards.check_all_known()

    def places(self) -> dict[str, FileRange]:
        """Of all tensors whose bytes a rank copies as they lie in a file, in the order in which they are built.

        Biases stay out: they are small, and a maker asks for them before the weights, not behind them.
        """
        places: dict[str, FileRange] = {}

        def note(name: str, target: Tensor) -> None:
            if not name.endswith(".bias") and self._layout_of(name) is None:
                place = self._shards.place(name, self._cut_of(name))
                if place is not None and place.numbers == target.numel():
                    places[name] = place

        _build(self._spec, META, torch.float32, MatrixSource(note), shard=self._shard)
        return places

    def source(self, copy: Copy, count: Callable[[int], None]) -> MatrixSource:
        """`copy` copies plain tensors. `count` is told the bytes of what was read, in the model's precision."""
        return MatrixSource(
            functools.partial(self._fill, copy, count), functools.partial(self._find, count), self._cut_of
        )

    def check_finite(self) -> None:
        """Raise if a tensor that was read has NaN or infinity; waits for the device."""
        for name in self._finite.not_finite():
            raise self._shards.not_finite_error(name, self._dtype)

    def _check(self, name: str, target: Tensor) -> None:
        """The tensors of a whole matrix, or the plain tensor."""
        layout = self._layout_of(name)
        if layout is None:
            self._shards.check_form(name, [tuple(target.shape)], tuple(DTYPES))
            return
        outputs, inputs = self._shapes[name] = (target.shape[0], target.shape[1])
        for rule in layout.rules(outputs, inputs):
            self._shards.check_form(f"{name.removesuffix(WEIGHT)}.{rule.suffix}", rule.shapes, rule.kinds)

    def _fill(self, copy: Copy, count: Callable[[int], None], name: str, target: Tensor) -> None:
        if not self._shard.holds(name):
            target.zero_()
        elif (stored := self._stored(name)) is not None:
            target.copy_(stored.weights())
        else:
            copy(name, target, self._cut_of(name))
        self._finite.note(name, target)
        count(target.nbytes)

    def _find(self, count: Callable[[int], None], name: str) -> StoredMatrix | None:
        found = self._stored(name)
        if found is not None:
            if found.codes.is_floating_point():
                self._finite.note(name, found.codes)
            count(found.codes.numel() * self._dtype.itemsize)
        return found

    def _stored(self, name: str) -> StoredMatrix | None:
        """This rank's part of a checked matrix, on the device; None if it is stored plain."""
        layout = self._layout_of(name)
        if layout is None:
            return None
        tensors = StoredTensors(self._shards, name.removesuffix(WEIGHT), self._device)
        return layout.read(tensors, window_of(self._cut_of(name), *self._shapes[name]))

    def _layout_of(self, name: str) -> Layout | None:
        is_matrix = name.endswith(("proj.weight", "lm_head.weight"))
        holds = is_matrix and self._layout is not None and self._layout.holds(name.removesuffix(WEIGHT))
        return self._layout if holds else None

    def _cut_of(self, name: str) -> Cut | None:
        return self._shard.cut(name, self._spec)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer: its four sites, and its family's norms."""

    qkv: Projection  # queries, keys and values of all heads, one below the other
    output: Projection
    gate_up: Projection
    down: Projection
    norms: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a whole model."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Projection
    size_bytes: int  # without fused LoRA A
    # By site, [layers, rows, inputs]: where the adapters' A lie below the matrices.
    fused_lora_a: Mapping[str, Tensor] = field(default_factory=dict)


def weight_bytes(spec: ModelSpec, dtype: torch.dtype, shard: Shard = WHOLE, maker: MatrixMaker | None = None) -> int:
    """The size of a model's weights, or of a rank's part of them, in the form that the maker gives them."""
    plain = _build(spec, META, dtype, MatrixSource(lambda *_: None), shard=shard).size_bytes
    return plain if maker is None else plain - _saved_bytes(shard.local(spec), dtype, maker)


def _saved_bytes(spec: ModelSpec, dtype: torch.dtype, maker: MatrixMaker) -> int:
    """How much less the layers' matrices take than plain ones; the head is left out."""
    return sum(
        site.outputs * site.inputs * dtype.itemsize - maker.size_bytes(site.outputs, site.inputs, dtype.itemsize)
        for layer in range(spec.layers)
        for site in site_shapes(spec)
        if maker.fits(weight_names(site, layer), site.outputs, site.inputs)
    )


def load_weights(
    folder: Path,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    quiet: bool = False,
    fused: FusedRows = NO_FUSED_ROWS,
    maker: MatrixMaker | None = None,
    shard: Shard = WHOLE,
    copier_for: CopierFor = pinned_on_gpu,
    ring: RingSetup = USUAL_SETUP,
) -> Weights:
    """Copy a folder's safetensors to the device; names and shapes are checked before the first copy, values after.

    A matrix that the folder stores in few bits is given to the maker so, and has the model's precision without one.
    `spec` is the whole model's. A rank reads only its part. With a copier, threads read tensors ahead into a ring.
    """
    with Shards(folder) as shards:
        load = WeightLoad(shards, read_layout(folder), spec, shard, device, dtype)
        load.check()
        title, size = f"Loading {folder.name}", weight_bytes(spec, dtype, shard)
        with Progress(title, size, BYTES, quiet) as progress, ExitStack() as stack:
            copy, copier = shards.copy, copier_for(device)
            if copier is not None:
                copy = stack.enter_context(WeightRing(load.places(), copier, ring, shards.copy)).copy
            weights = _build(spec, device, dtype, load.source(copy, progress.update), fused, maker, shard)
            load.check_finite()
            return weights


def dummy_weights(
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    fused: FusedRows = NO_FUSED_ROWS,
    maker: MatrixMaker | None = None,
    shard: Shard = WHOLE,
) -> Weights:
    """Random weights of the model's shape, drawn on the device; activations neither vanish nor explode.

    Ranks draw whole tensors and keep their part, so that any number of ranks has the same model.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def fill(name: str, target: Tensor) -> None:
        START.tell_progress("Drawing weights")
        if name.endswith("norm.weight"):
            target.fill_(1.0)
            return
        cut = shard.cut(name, spec)
        whole = target
        if cut is not None:
            whole = target.new_empty([cut.of if axis == cut.axis else n for axis, n in enumerate(target.shape)])
        whole.normal_(0.0, whole.shape[-1] ** -0.5, generator=generator)
        if cut is not None:
            target.copy_(whole.narrow(cut.axis, cut.first, cut.end - cut.first))
        if not shard.holds(name):
            target.zero_()

    source = MatrixSource(fill, cut_of=functools.partial(shard.cut, spec=spec))
    return _build(spec, device, dtype, source, fused, maker, shard)


def _build(
    whole: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    source: MatrixSource,
    fused: FusedRows = NO_FUSED_ROWS,
    maker: MatrixMaker | None = None,
    shard: Shard = WHOLE,
) -> Weights:
    spec, tokens = shard.local(whole), shard.tokens(whole.vocab_size)
    builder = MatrixBuilder(device, dtype, source, spec.layers, fused, maker)
    embedding = builder.tensor("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
    layers = tuple(_build_layer(spec, builder, index) for index in range(spec.layers))
    norm = builder.tensor("model.norm.weight", spec.hidden_size)
    if spec.has_tied_embeddings:
        # Every rank needs the rows of all tokens to embed them; its head is some of the rows.
        rows = embedding if shard.size == 1 else embedding[tokens.first : tokens.end]
        head = builder.tied_head("model.embed_tokens.weight", rows, tokens)
    else:
        head = builder.head("lm_head.weight", tokens.end - tokens.first, spec.hidden_size)
    return Weights(embedding, layers, norm, head, builder.size_bytes, builder.fused_lora_a)


def _build_layer(spec: ModelSpec, builder: MatrixBuilder, index: int) -> LayerWeights:
    qkv, output, gate_up, down = (builder.site(shape, index) for shape in site_shapes(spec))
    norms = {name: builder.tensor(f"model.layers.{index}.{name}.weight", width) for name, width in spec.layer_norms}
    return LayerWeights(qkv, output, gate_up, down, norms)
