"""Stored matrices are read from a folder's safetensors by the folder's layout."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rota.core.errors import ModelError
from rota.engine.parallel.shard import Cut
from rota.engine.quantised.maker import StoredMatrix
from rota.engine.weights.layouts.layout import Layout, Stretch, window_of
from rota.engine.weights.shards import NOT_FINITE, Shards

WEIGHT = ".weight"


class StoredTensors:
    """The tensors of one matrix; scales are checked on the host, where they lie."""

    def __init__(self, shards: Shards, module: str, device: torch.device) -> None:
        self._shards = shards
        self._module = module
        self._device = device

    def shape(self, suffix: str) -> tuple[int, ...]:
        return self._shards.shape(self._name(suffix))

    def read(self, suffix: str, *stretches: Stretch) -> Tensor:
        return self._host(suffix, *stretches).to(self._device)

    def scale(self, suffix: str, *stretches: Stretch, is_positive: bool = False) -> Tensor:
        values = self._host(suffix, *stretches).float()
        least, most = (float(extreme) for extreme in values.aminmax())
        if not (math.isfinite(least) and math.isfinite(most)):
            raise self.error(suffix, f"{NOT_FINITE}; get other weights")
        if is_positive and least <= 0:
            raise self.error(suffix, f"has the value {least}, but a scale is above zero; get other weights")
        return values.to(self._device)

    def error(self, suffix: str, problem: str) -> ModelError:
        return self._shards.error(self._name(suffix), problem)

    def _host(self, suffix: str, *stretches: Stretch) -> Tensor:
        return self._shards.read(self._name(suffix), *(slice(each.first, each.end) for each in stretches))

    def _name(self, suffix: str) -> str:
        return f"{self._module}.{suffix}"


class StoredMatrices:
    """Finds matrices by the names of their weights; a folder without a layout has none."""

    def __init__(self, shards: Shards, layout: Layout | None, device: torch.device) -> None:
        self._shards = shards
        self._layout = layout
        self._device = device
        self._shapes: dict[str, tuple[int, int]] = {}

    def check(self, name: str, target: Tensor) -> None:
        """Raise unless the tensors of a whole matrix, or the plain tensor, have the shapes and kinds that they must."""
        layout = self._layout_of(name)
        if layout is None:
            self._shards.check(name, target)
            return
        outputs, inputs = self._shapes[name] = (target.shape[0], target.shape[1])
        for rule in layout.rules(outputs, inputs):
            self._shards.check_form(f"{name.removesuffix(WEIGHT)}.{rule.suffix}", rule.shapes, rule.kinds)

    def pass_over_biases(self) -> None:
        """Old GPTQ folders have a bias of zeros for every matrix, also where the model has none."""
        for name in self._shapes:
            self._shards.pass_over_zeros(f"{name.removesuffix(WEIGHT)}.bias")

    def is_plain(self, name: str) -> bool:
        """Whether the folder stores a tensor as numbers, one for each of its elements."""
        return self._layout_of(name) is None

    def find(self, name: str, cut: Cut | None = None) -> StoredMatrix | None:
        """A checked matrix, or a stretch of it, on the device; None if it is stored plain."""
        layout = self._layout_of(name)
        if layout is None:
            return None
        tensors = StoredTensors(self._shards, name.removesuffix(WEIGHT), self._device)
        return layout.read(tensors, window_of(cut, *self._shapes[name]))

    def _layout_of(self, name: str) -> Layout | None:
        is_matrix = name.endswith(("proj.weight", "lm_head.weight"))
        holds = is_matrix and self._layout is not None and self._layout.holds(name.removesuffix(WEIGHT))
        return self._layout if holds else None
