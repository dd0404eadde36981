"""A layout says how a folder stores its matrices in few bits: which tensors each has, and what they mean."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rota.core.errors import ModelError
from rota.engine.model.config_file import ConfigFile
from rota.engine.parallel.shard import Cut
from rota.engine.quantised.maker import StoredMatrix
from rota.engine.weights.shards import NOT_FINITE, Shards

# In safetensors' words.
INTEGERS = ("I32",)
PLAIN = ("F32", "F16", "BF16")
WEIGHT = ".weight"


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
class MatrixWindow:
    """The part of a matrix that a rank holds."""

    outputs: Stretch
    inputs: Stretch


def window_of(cut: Cut | None, outputs: int, inputs: int) -> MatrixWindow:
    """What a cut leaves of a matrix of these sizes."""
    rows, columns = Stretch(0, outputs), Stretch(0, inputs)
    if cut is None:
        return MatrixWindow(rows, columns)
    stretch = Stretch(cut.first, cut.end)
    return MatrixWindow(stretch, columns) if cut.axis == 0 else MatrixWindow(rows, stretch)


class StoredTensors:
    """The stored tensors of one matrix, on the device; scales are checked on the host, when they are read."""

    def __init__(self, shards: Shards, module: str, device: torch.device) -> None:
        self._shards = shards
        self._module = module
        self._device = device

    def shape(self, suffix: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self._shards.shape(self._name(suffix))

    def read(self, suffix: str, *stretches: Stretch) -> Tensor:
        """The tensor, or the stretches of its first axes."""
        return self._host(suffix, *stretches).to(self._device)

    def scale(self, suffix: str, *stretches: Stretch, is_positive: bool = False) -> Tensor:
        """The same in float32; ModelError unless it is finite, and above zero if it must be."""
        values = self._host(suffix, *stretches).float()
        least, most = (float(extreme) for extreme in values.aminmax())
        if not (math.isfinite(least) and math.isfinite(most)):
            raise self.error(suffix, f"{NOT_FINITE}; get other weights")
        if is_positive and least <= 0:
            raise self.error(suffix, f"has the value {least}, but a scale is above zero; get other weights")
        return values.to(self._device)

    def error(self, suffix: str, problem: str) -> ModelError:
        """Names file and tensor."""
        return self._shards.error(self._name(suffix), problem)

    def _host(self, suffix: str, *stretches: Stretch) -> Tensor:
        return self._shards.read(self._name(suffix), *(slice(each.first, each.end) for each in stretches))

    def _name(self, suffix: str) -> str:
        return f"{self._module}.{suffix}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout(ABC):
    """How a folder stores matrices; one layout for all of them."""

    method: str  # its name in sentences
    bits: Literal[4, 8]
    group_size: int | None = None  # how many inputs share a scale; None: all
    holds: Callable[[str], bool]  # whether the module of this name is stored so; the others are plain

    @abstractmethod
    def rules(self, outputs: int, inputs: int) -> tuple[Rule, ...]:
        """The tensors of a whole matrix."""

    @abstractmethod
    def read(self, tensors: StoredTensors, window: MatrixWindow) -> StoredMatrix:
        """A window of a matrix whose tensors have been checked."""


# ── fields ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# Fields that several layouts' configs have, read and checked before any tensor is.

NIBBLE = 4


def refusal(config: ConfigFile, what: str, nearest: str) -> ModelError:
    return ModelError(f"{config.path} describes {what}, which Rota does not read; it reads {nearest}.")


def only(config: ConfigFile, field: str, values: Sequence[Any], what: str, nearest: str) -> None:
    """Refuse a field that has none of the values; the first is what a folder without the field means."""
    found = config.get(field, values[0])
    if not any(type(found) is type(value) and found == value for value in values):
        raise refusal(config, f"{what} ('{field}' is {found!r})", nearest)


def read_bits(config: ConfigFile, method: str, *fields: str) -> None:
    """Refuse other than four bits."""
    field = next((each for each in fields if config.get(each) is not None), fields[0])
    if config.whole(field) != NIBBLE:
        raise refusal(config, f"{method} weights in {config.get(field)} bits", "those in four bits")


def read_group_size(config: ConfigFile, *fields: str) -> int | None:
    """None where all inputs share a scale, for which configs have -1."""
    field = next((each for each in fields if config.get(each) is not None), fields[0])
    return None if config.get(field) == -1 else config.whole(field)


# ── modules ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# Which modules a config means: by their names, by parts of them, or by expressions.

HEAD = "lm_head"
EXPRESSION = "re:"
# What compressed-tensors calls every matrix.
EVERY_MATRIX = "Linear"


@dataclass(frozen=True, slots=True)
class Modules:
    """Those that a list of names means, an expression behind 're:'; a part of a dotted name means all below it."""

    names: tuple[str, ...]

    def __contains__(self, module: str) -> bool:
        return any(self._means(name, module) for name in self.names)

    @staticmethod
    def _means(name: str, module: str) -> bool:
        if name == EVERY_MATRIX:
            return True
        if name.startswith(EXPRESSION):
            return re.match(name.removeprefix(EXPRESSION), module) is not None
        return f".{name}." in f".{module}."


def read_modules(config: ConfigFile, *fields: str) -> Modules:
    """The modules that the first of these fields lists; none if there is no such field."""
    for field in fields:
        if (value := config.get(field)) is not None:
            return checked_modules(config, field, value)
    return Modules(())


def checked_modules(config: ConfigFile, field: str, value: object) -> Modules:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ModelError(f"{config.path}: '{field}' must be a list of module names, not {value!r}.")
    for name in value:
        if name.startswith(EXPRESSION):
            _check_expression(config, field, name)
    return Modules(tuple(value))


def all_but(left_out: Modules) -> Callable[[str], bool]:
    """Every module but those, and but the head, which all methods leave plain without a word."""
    plain = Modules((*left_out.names, HEAD))
    return lambda module: module not in plain


def _check_expression(config: ConfigFile, field: str, name: str) -> None:
    try:
        re.compile(name.removeprefix(EXPRESSION))
    except re.error as error:
        raise ModelError(f"{config.path}: '{field}' has the expression {name!r}, which is wrong: {error}.") from error
