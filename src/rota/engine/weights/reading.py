"""Reading is the source of matrices while a folder is loaded: it copies, dequantises where need be, and counts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rota.engine.model.spec import ModelSpec
from rota.engine.parallel.shard import Cut, Shard
from rota.engine.quantised.maker import Stored
from rota.engine.weights.finite import FiniteCheck
from rota.engine.weights.matrices import Source
from rota.engine.weights.reads.parallel import Copies
from rota.engine.weights.shards import Shards
from rota.engine.weights.stored import StoredMatrices


class Reading:
    """One load of a rank's part of a model whose tensors have been checked."""

    def __init__(
        self,
        shards: Shards,
        stored: StoredMatrices,
        spec: ModelSpec,
        shard: Shard,
        dtype: torch.dtype,
        count: Callable[[int], None],
        copies: Copies,
    ) -> None:
        """`count` is told the bytes of what was read, in the model's precision. Plain tensors come from `copies`."""
        self._shards = shards
        self._stored = stored
        self._spec = spec
        self._shard = shard
        self._dtype = dtype
        self._count = count
        self._copies = copies
        self._finite = FiniteCheck()
        self.source = Source(self._fill, self._find, self._cut_of)

    def check_finite(self) -> None:
        """Raise if a tensor that was read has NaN or infinity; waits for the device."""
        for name in self._finite.not_finite():
            raise self._shards.not_finite_error(name, self._dtype)

    def _fill(self, name: str, target: Tensor) -> None:
        if not self._shard.holds(name):
            target.zero_()
        elif (stored := self._stored.find(name, self._cut_of(name))) is not None:
            target.copy_(stored.weights())
        else:
            self._copies.copy(name, target, self._cut_of(name))
        self._finite.note(name, target)
        self._count(target.nbytes)

    def _find(self, name: str) -> Stored | None:
        found = self._stored.find(name, self._cut_of(name))
        if found is not None:
            if found.codes.is_floating_point():
                self._finite.note(name, found.codes)
            self._count(found.codes.numel() * self._dtype.itemsize)
        return found

    def _cut_of(self, name: str) -> Cut | None:
        return self._shard.cut(name, self._spec)
