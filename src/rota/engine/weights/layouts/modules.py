"""Which modules a config means: by their names, by parts of them, or by expressions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rota.core.errors import ModelError
from rota.engine.model.config_file import ConfigFile

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


def all_but(left_out: Modules, others: Sequence[str] = (HEAD,)) -> Callable[[str], bool]:
    """Every module but those, and but those that a method leaves plain without a word."""
    never = Modules(tuple(others))
    return lambda module: module not in left_out and module not in never


def _check_expression(config: ConfigFile, field: str, name: str) -> None:
    try:
        re.compile(name.removeprefix(EXPRESSION))
    except re.error as error:
        raise ModelError(f"{config.path}: '{field}' has the expression {name!r}, which is wrong: {error}.") from error
