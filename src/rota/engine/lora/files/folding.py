"""Folding turns DoRA's magnitudes and an adapter's biases into trims: a gain and a shift for each output.

    PEFT      y = bias' + m / |W + B A| · (x Wᵀ + x Aᵀ Bᵀ)  +  b        m, bias' and b are the adapter's own
    a trim    y = gain · (x Wᵀ + bias + x Aᵀ Bᵀ) + shift              what the model and its factors give, trimmed

|W + B A|² of a row is |W|² + 2 (W Aᵀ) · B + B (A Aᵀ) Bᵀ: one product of the model with the rows of A, and no matrix of
the model's size is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rota.engine.lora.base_matrices import BaseMatrices
from rota.engine.lora.files.folder import AdapterFolder
from rota.engine.lora.files.tensor_file import Stored
from rota.engine.lora.host import StackedSite
from rota.engine.lora.trims import empty_run, site_trims
from rota.engine.model.sites import SiteShape, module_name
from rota.engine.parallel.shard import BY_INPUTS, Cut

# A part's stretch of outputs; None: all of them.
CutOf = Callable[[str], Cut | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Folding:
    """A folder that is open, its factors as they were stacked, and the model below."""

    folder: AdapterFolder
    base: BaseMatrices
    cut_of: CutOf
    adds_biases: bool  # behind a sum over ranks, only one of them does

    def trims(self, shapes: tuple[SiteShape, ...], sites: list[StackedSite]) -> Tensor:
        """The run of an adapter's trims: [layers, 2 * outputs of all sites] float32."""
        run = empty_run(shapes, len(sites[0].a))
        with self.base.alone():
            for layer, line in enumerate(run):
                for shape, site, target in zip(shapes, sites, site_trims(line, shapes), strict=True):
                    self._fold(target, shape, layer, site)
        return run

    def _fold(self, target: Tensor, shape: SiteShape, layer: int, site: StackedSite) -> None:
        gain, shift = target
        if self.folder.config.is_dora and site.b.shape[1]:
            gain.copy_(self._gains(shape, layer, site.a[layer], site.b[layer]))
        shift.copy_(self._shifts(shape, layer, gain))

    def _gains(self, shape: SiteShape, layer: int, a: Tensor, b: Tensor) -> Tensor:
        """m / |W + B A| of every row; 1 for parts without factors. a: [parts, rank, inputs], b: [rank, outputs]."""
        device, rank = self.base.device, b.shape[0]
        a, b = a.to(device).float(), b.to(device).float()
        crossed = self.base.products(layer, shape.name, a.flatten(0, 1))
        squares = self.base.squares(layer, shape.name)
        gains = []
        for index, columns in enumerate(_columns(shape)):
            part_b, own = b[:, columns], crossed[index * rank : (index + 1) * rank, columns]
            magnitude = self._magnitude(layer, shape.parts[index][0])
            norm = norms(squares[columns], own, a[index] @ a[index].T, part_b).cpu()
            gains.append(torch.ones_like(norm) if magnitude is None else magnitude / norm)
        return torch.cat(gains)

    def _shifts(self, shape: SiteShape, layer: int, gain: Tensor) -> Tensor:
        """Only x Wᵀ + x Aᵀ Bᵀ is scaled: the model's own bias comes off scaled, and the adapter's is added."""
        own = self.base.bias(layer, shape.name).cpu()
        shift = own - gain * own
        for (part, _), columns in zip(shape.parts, _columns(shape), strict=True):
            module = module_name(layer, part)
            if part in BY_INPUTS and not self.adds_biases:
                continue
            if module in self.folder.biases:
                shift[columns] += self._read(self.folder.biases[module], part) - own[columns]
            factors = self.folder.factors.get(module)
            if factors is not None and factors.b_bias is not None:
                shift[columns] += self._read(factors.b_bias, part) * self.folder.config.scale_of(module)
        return shift

    def _magnitude(self, layer: int, part: str) -> Tensor | None:
        factors = self.folder.factors.get(module_name(layer, part))
        return None if factors is None or factors.magnitude is None else self._read(factors.magnitude, part)

    def _read(self, stored: Stored, part: str) -> Tensor:
        cut, whole = self.cut_of(part), stored.read().float()
        return whole if cut is None else whole[cut.first : cut.end]


def norms(squares: Tensor, crossed: Tensor, gram: Tensor, b: Tensor) -> Tensor:
    """|W + B A| of every row, from |W|², W Aᵀ and A Aᵀ; crossed and b: [rank, outputs], gram: [rank, rank]."""
    return (squares + 2 * (crossed * b).sum(0) + (b * (gram @ b)).sum(0)).clamp_min(0.0).sqrt()


def _columns(shape: SiteShape) -> list[slice]:
    """The outputs of each part."""
    ends = torch.tensor(shape.widths).cumsum(0).tolist()
    return [slice(end - width, end) for end, width in zip(ends, shape.widths, strict=True)]
