"""A layout says how a folder stores its matrices in few bits: which tensors each has, and what they mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from rota.core.errors import ModelError
from rota.engine.parallel.shard import Cut
from rota.engine.quantised.maker import Stored

# In safetensors' words.
INTEGERS = ("I32",)
PLAIN = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A tensor that a matrix has below its module's name."""

    suffix: str
    kinds: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]  # any of them


@dataclass(frozen=True, slots=True)
class Stretch:
    """The numbers [first, end) of an axis."""

    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first

    def held_by(self, width: int) -> Stretch:
        """The words that hold these numbers, if each holds `width` of them."""
        return Stretch(self.first // width, -(-self.end // width))

    def within(self, tensor: Tensor, axis: int, width: int) -> Tensor:
        """These numbers of a tensor that begins where the first word of so many begins."""
        return tensor.narrow(axis, self.first % width, len(self))


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a matrix that a rank holds."""

    outputs: Stretch
    inputs: Stretch


def window_of(cut: Cut | None, outputs: int, inputs: int) -> Window:
    """What a cut leaves of a matrix of these sizes."""
    rows, columns = Stretch(0, outputs), Stretch(0, inputs)
    if cut is None:
        return Window(rows, columns)
    stretch = Stretch(cut.first, cut.end)
    return Window(stretch, columns) if cut.axis == 0 else Window(rows, stretch)


class Tensors(Protocol):
    """The stored tensors of one matrix, on the device; a scale is checked when it is read."""

    def shape(self, suffix: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        ...

    def read(self, suffix: str, *stretches: Stretch) -> Tensor:
        """The tensor, or the stretches of its first axes."""
        ...

    def scale(self, suffix: str, *stretches: Stretch, is_positive: bool = False) -> Tensor:
        """The same in float32; ModelError unless it is finite, and above zero if it must be."""
        ...

    def error(self, suffix: str, problem: str) -> ModelError:
        """Names file and tensor."""
        ...


class Layout(Protocol):
    """How a folder stores matrices; one layout for all of them."""

    @property
    def method(self) -> str:
        """Its name in sentences."""
        ...

    @property
    def bits(self) -> Literal[4, 8]: ...

    @property
    def group_size(self) -> int | None:
        """How many inputs share a scale; None: all."""
        ...

    @property
    def holds(self) -> Callable[[str], bool]:
        """Whether the module of this name is stored so; the others are plain."""
        ...

    def rules(self, outputs: int, inputs: int) -> tuple[Rule, ...]:
        """The tensors of a whole matrix."""
        ...

    def read(self, tensors: Tensors, window: Window) -> Stored:
        """A window of a matrix whose tensors have been checked."""
        ...
