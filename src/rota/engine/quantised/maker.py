"""A maker gives a model's matrices the form that a device multiplies; without a maker they stay plain."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rota.engine.model.linear import Projection, projection
from rota.engine.parallel.shard import Cut

# Which stretch of the tensor of this name is read; None: all of it.
CutOf = Callable[[str], Cut | None]


class StoredMatrix(Protocol):
    """A matrix in few bits, as a folder has it: `Scaled`, `Codes`, or another form that no product takes."""

    @property
    def codes(self) -> Tensor:
        """[outputs, inputs], of eight-bit floats or of integers."""
        ...

    def weights(self) -> Tensor:
        """[outputs, inputs] float32: the matrix itself."""
        ...


# That stretch as the folder stores it, on the device; None if it is stored plain.
Find = Callable[[str], StoredMatrix | None]


def uncut(_name: str) -> None:
    """Every tensor is read whole."""


def nothing_stored(_name: str) -> None:
    """Every tensor is stored plain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A site's matrix before it is made: parts one below the other, read only when a maker asks for them."""

    names: Sequence[str]  # of the parts' weights
    bias: Tensor | None = None
    weight: Callable[[], Tensor]  # reads all parts, in the model's precision
    cut_of: CutOf = uncut
    find: Find = nothing_stored


class MatrixMaker(ABC):
    """Makes the matrices that fit; adapters run beside them, so none has a fused LoRA A."""

    @abstractmethod
    def fits(self, names: Sequence[str], outputs: int, inputs: int) -> bool:
        """Whether a matrix of these parts takes the maker's form."""

    @abstractmethod
    def size_bytes(self, outputs: int, inputs: int, dtype_bytes: int) -> int:
        """What a matrix that fits will take, without its bias, in a model of this precision."""

    @abstractmethod
    def site(self, parts: Parts) -> Projection:
        """A site's matrix that fits."""

    def head(self, _name: str, weight: Tensor, _cut: Cut | None = None) -> Projection:
        """The head's matrix. It decides between tokens, and keeps the precision of `weight`, which is the model's."""
        return projection(weight)
