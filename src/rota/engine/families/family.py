"""A Family is what one file defines so that Rota serves the models of an architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rota.engine.attention.protocol import Attention
from rota.engine.lora.deferred import Output
from rota.engine.lora.embed_head import EmbedHead
from rota.engine.model.config_file import ConfigFile
from rota.engine.model.linear import Projection
from rota.engine.model.protocol import Model
from rota.engine.ops.protocol import OPEN_SITES, Operations
from rota.engine.parallel.group import ONE_RANK, RankGroup
from rota.engine.step.device_step import LoraBatch
from rota.engine.weights.load import Weights

# (projection, x, layer, site, batch): a product at a site of a layer, plus what each token's adapter adds.
ProjectWithAdapters = Callable[[Projection, Tensor, int, str, LoraBatch], Output]


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a model computes with on the chosen device."""

    operations: Operations
    attention: Attention
    with_adapters: ProjectWithAdapters | None = None  # None: no step has adapters
    group: RankGroup = ONE_RANK  # ranks that each hold a part of the model
    embed_head: EmbedHead | None = None  # what adapters add to the embedding and to the head; None: nothing
    # By site: up to how many decodes the operation behind a product adds the adapters' part.
    open_sites: Mapping[str, int] = field(default_factory=lambda: OPEN_SITES)


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture, by its name in config.json."""

    architecture: str
    read: Callable[[ConfigFile], Any]  # returns a ModelSpec, or the family's subclass
    make: Callable[[Any, Weights, Kernels], Model]  # takes that spec
