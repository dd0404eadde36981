"""Matrices are allocated as the forward pass needs them, and a `Fill` writes their numbers part by part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rota.engine.model.gemm_choice import GemmChoice
from rota.engine.model.linear import Linear, Matrix, Projection, projection
from rota.engine.model.sites import SiteShape, module_name
from rota.engine.parallel.shard import Cut
from rota.engine.quantised.maker import CutOf, Find, MatrixMaker, Parts, nothing_stored, uncut

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

    def site(self, shape: SiteShape, layer: int, has_bias: bool) -> Projection:
        """The matrices of a site's parts, one below the other, and below them the rows of a fused LoRA A."""
        names = weight_names(shape, layer)
        if self._maker is not None and self._maker.fits(names, shape.outputs, shape.inputs):
            return self._counted(self._made(self._maker, names, shape, layer, has_bias))
        rows = self._fused_rows.get(shape.name, 0)
        weight = self._block(shape, rows)[layer] if rows else self._empty(shape.outputs, shape.inputs)
        # The bias is zero at the adapters' rows.
        bias = torch.zeros(len(weight), dtype=self._dtype, device=self._device) if has_bias else None
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

    def _made(
        self, maker: MatrixMaker, names: Sequence[str], shape: SiteShape, layer: int, has_bias: bool
    ) -> Projection:
        def weight() -> Tensor:
            return self._fill_parts(shape, layer, "weight", self._empty(shape.outputs, shape.inputs))

        bias = self._fill_parts(shape, layer, "bias", self._empty(shape.outputs)) if has_bias else None
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
