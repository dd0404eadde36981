"""A cache scope names the requests that find each other's KV: those of one key, or of keys that share prefixes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

from rota.core.errors import ConfigError


def group_scope(names: Collection[str]) -> str:
    """The scope of a group of keys. A group that gains or loses a key begins with an empty cache."""
    return _digest({"keys": sorted(names)})


def salted_scope(scope: str, salt: str) -> str:
    """The part of a scope that only requests with the same salt share."""
    return _digest({"scope": scope, "salt": salt})


def groups_of(shares: Mapping[str, Collection[str] | None]) -> dict[str, frozenset[str]]:
    """The group of every key. `shares` has the names that each key lists; None is all keys.

    Sharing is mutual and transitive: a list that names a key joins the groups of both. Raises ConfigError for a name
    that no key has.
    """
    groups = {name: {name} for name in shares}
    for name, listed in shares.items():
        for other in shares if listed is None else sorted(listed):
            if other not in groups:
                raise ConfigError(f"'{name}': shares_prefixes_with names '{other}', and no key has that name.")
            if groups[other] is not groups[name]:
                groups[name] |= groups[other]
                for member in groups[other]:
                    groups[member] = groups[name]
    return {name: frozenset(group) for name, group in groups.items()}


def _digest(content: dict[str, Any]) -> str:
    """JSON keeps names and salts apart, so that none of them can spell another scope. A digest is short."""
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()
