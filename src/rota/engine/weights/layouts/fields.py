"""Fields that several layouts' configs have, read and checked before any tensor is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rota.core.errors import ModelError
from rota.engine.model.config_file import ConfigFile

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
