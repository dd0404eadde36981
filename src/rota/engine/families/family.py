"""A Family is what one file defines so that Rota serves the models of an architecture."""

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
from rota.engine.parallel.group import ONE_RANK, Group
from rota.engine.step.lora_batch import LoraBatch
from rota.engine.weights.load import Weights

# (projection, x, layer, site, batch): a product at a site of a layer, plus what each token's adapter adds.
ProjectWithAdapters = Callable[[Projection, Tensor, int, str, LoraBatch], Tensor]


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a model computes with on the chosen device."""

    operations: Operations
    attention: Attention
    with_adapters: ProjectWithAdapters | None = None  # None: no step has adapters
    group: Group = ONE_RANK  # ranks that each hold a part of the model


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture, by its name in config.json."""

    architecture: str
    read: Callable[[ConfigFile], Any]  # returns a ModelSpec, or the family's subclass
    make: Callable[[Any, Weights, Kernels], Model]  # takes that spec
