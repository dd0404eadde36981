"""A ConfigFile reads checked values from one JSON file of a model folder; its errors name the file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rota.core.errors import ModelError


class ConfigFile:
    """A JSON object whose values are read by name and kind; null counts as left out."""

    def __init__(self, path: Path, values: dict[str, Any] | None = None) -> None:
        self.path = path
        self.values = read_json(path) if values is None else values

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def section(self, name: str) -> dict[str, Any]:
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise ModelError(f"{self.path}: '{name}' must be an object, not {value!r}.")
        return value

    def whole(self, name: str, default: int | None = None) -> int:
        value = self._present(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{self.path}: '{name}' must be a whole number of at least 1, not {value!r}.")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._present(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ModelError(f"{self.path}: '{name}' must be a finite number above 0, not {value!r}.")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.path}: '{name}' must be true or false, not {value!r}.")
        return value

    def _present(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        if value is None:
            raise ModelError(f"{self.path} has no '{name}'; download the model's config.json again.")
        return value


def read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}); download it again.") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds no JSON object; download it again.")
    return values
