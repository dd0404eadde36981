"""An entry of --lora-paths says where an adapter lies and what its name is."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePath
from typing import Any

from rota.core.errors import ConfigError

FORMS = "give PATH, NAME=PATH, or JSON with lora_name, lora_path, pinned and weight"
JSON_FIELDS = ("lora_name", "lora_path", "pinned", "weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraPath:
    """An adapter to be loaded, as it was asked for: the folder may not exist."""

    name: str
    path: str
    is_pinned: bool = False
    weight: float = 1.0  # its share of slot time relative to others
    # The adapter comes with Rota, so it need not lie in the adapter root. No entry and no client can claim this.
    is_builtin: bool = False
    # The folder of its key, which it must not leave, and the key's name. None, as for every entry: the server's adapter
    # root, and the operator.
    root: str | None = None
    owner: str | None = None
    size_bytes: int = 0  # that the server's disks keep for it; 0: it lies in a folder


@lru_cache(maxsize=1)  # a start asks several times, and there may be thousands
def parse_lora_paths(entries: tuple[str, ...]) -> tuple[LoraPath, ...]:
    """All entries of --lora-paths; two entries of one name are refused."""
    parsed = tuple(map(parse_lora_path, entries))
    paths: dict[str, str] = {}
    for entry in parsed:
        if entry.name in paths:
            raise ConfigError(
                f"lora_paths names two adapters '{entry.name}': {paths[entry.name]} and {entry.path}; give one of them "
                "another name with NAME=PATH."
            )
        paths[entry.name] = entry.path
    return parsed


def parse_lora_path(entry: str) -> LoraPath:
    """One entry in any of its three forms."""
    text = entry.strip()
    if text.startswith("{"):
        return _from_json(text)
    name, equals, path = text.partition("=")
    # No name begins like a path, so a folder may have an equals sign in it: ./runs/r=8.
    if not equals or name.startswith(("/", "./", "../", "~")) or "://" in name:
        return _named(None, text, entry)
    return _named(name, path, entry)


def _from_json(text: str) -> LoraPath:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"lora_paths: {text} is not JSON ({error}); {FORMS}.") from error
    for name in fields:
        if name not in JSON_FIELDS:
            raise ConfigError(f"lora_paths: {text} has a field '{name}'; the fields are {', '.join(JSON_FIELDS)}.")
    pinned, weight = fields.get("pinned", False), fields.get("weight", 1.0)
    if not isinstance(pinned, bool):
        raise ConfigError(f"lora_paths: 'pinned' must be true or false, not {pinned!r}, in {text}.")
    if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0.0 < weight < math.inf:
        raise ConfigError(f"lora_paths: 'weight' must be a finite number above 0, not {weight!r}, in {text}.")
    return _named(fields.get("lora_name"), fields.get("lora_path"), text, pinned, float(weight))


def _named(name: Any, path: Any, entry: str, pinned: bool = False, weight: float = 1.0) -> LoraPath:
    """An adapter without a given name takes the name of its folder, without a revision on the Hub."""
    if not isinstance(path, str) or not path.strip():
        raise ConfigError(f"lora_paths: '{entry}' has no path; {FORMS}.")
    path = path.strip()
    if name is None:
        name = _last_name(path.partition("@")[0] if path.startswith("hf://") else path)
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"lora_paths: '{entry}' has no name; {FORMS}.")
    return LoraPath(name=name.strip(), path=path, is_pinned=pinned, weight=weight)


def _last_name(path: str) -> str:
    """The name of a path's folder; `PurePath` alone would take ten times as long, and there may be thousands."""
    name = path.rpartition("/")[2]
    return PurePath(path).name if name in ("", ".") else name
