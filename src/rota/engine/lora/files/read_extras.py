"""What an adapter has besides the factors of its layers: trims, factors at the ends, matrices of its own."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rota.engine.lora.base_ends import BaseEnds
from rota.engine.lora.base_matrices import BaseMatrices
from rota.engine.lora.files.end_factors import read_ends, read_own
from rota.engine.lora.files.filling import FactorCut
from rota.engine.lora.files.folder import AdapterFolder
from rota.engine.lora.files.folding import Folding
from rota.engine.lora.files.names import EMBEDDING, HEAD
from rota.engine.lora.host import EndFactors, StackedSite
from rota.engine.model.sites import SiteShape
from rota.engine.model.spec import ModelSpec
from rota.engine.parallel.shard import Cut, Shard


class Extras(NamedTuple):
    """As a HostAdapter has them."""

    trims: Tensor | None = None
    embedding: EndFactors | None = None
    head: EndFactors | None = None
    own_embedding: tuple[Tensor, ...] | None = None
    own_head: tuple[Tensor, ...] | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        trims = () if self.trims is None else (self.trims,)
        ends = (tensor for end in (self.embedding, self.head) if end for tensor in end.tensors)
        return (*trims, *ends, *(self.own_embedding or ()), *(self.own_head or ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtrasReader:
    """Reads them for the slots of one bank; without a `base` these have no trims, and they have these `ends`."""

    spec: ModelSpec  # of the whole model
    shapes: tuple[SiteShape, ...]
    dtype: torch.dtype
    shard: Shard
    cut_of: FactorCut
    base: BaseMatrices | None
    ends: BaseEnds | None

    def read(self, folder: AdapterFolder, sites: list[StackedSite]) -> Extras:
        """The sites are filled. Blocks on the disk."""
        trims = None if self.base is None else self._trims(folder, self.base, sites)
        embedding, head = None, None
        vocabulary, own = self.spec.vocab_size, self.shard.tokens(self.spec.vocab_size)
        if self.ends is not None:
            with nullcontext() if self.base is None else self.base.alone():
                embedding, head = read_ends(folder, self.spec, self.ends, self.dtype, own)
        own_embedding = read_own(folder, EMBEDDING, self.dtype, Cut(0, 0, vocabulary, vocabulary))
        return Extras(trims, embedding, head, own_embedding, read_own(folder, HEAD, self.dtype, own))

    def _trims(self, folder: AdapterFolder, base: BaseMatrices, sites: list[StackedSite]) -> Tensor | None:
        if not (folder.config.is_dora or folder.config.has_factor_biases or folder.biases):
            return None
        cut = functools.partial(_cut_of_outputs, self.cut_of)
        folding = Folding(folder=folder, base=base, cut_of=cut, adds_biases=self.shard.rank == 0)
        return folding.trims(self.shapes, sites)


def _cut_of_outputs(cut_of: FactorCut, part: str) -> Cut | None:
    """B's stretch is that of the outputs."""
    return cut_of(part, "b")
