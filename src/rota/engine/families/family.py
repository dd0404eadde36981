"""A Family is what one file brings so that the models of an architecture can be served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rota.engine.attention.protocol import Attention
from rota.engine.model.config_file import ConfigFile
from rota.engine.model.linear import Projection
from rota.engine.model.protocol import Model
from rota.engine.ops.protocol import Operations
from rota.engine.step.lora_batch import LoraBatch
from rota.engine.weights.load import Weights

# A product at a site of a layer, with what each token's adapter adds to it.
ProjectWithAdapters = Callable[[Projection, Tensor, int, str, LoraBatch], Tensor]


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a model computes with, on the device at hand."""

    operations: Operations
    attention: Attention
    with_adapters: ProjectWithAdapters | None = None  # None: no step brings adapters


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture, by the name that config.json has for it."""

    architecture: str
    read: Callable[[ConfigFile], Any]  # gives a ModelSpec, or the family's own kind of it
    make: Callable[[Any, Weights, Kernels], Model]  # of such a spec
