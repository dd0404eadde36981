"""A key stands for a tenant: what it may use, what it may change, and how much of the server it may take."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Key:
    """One tenant's rights, without its secret. By default it may do everything."""

    name: str
    adapters: frozenset[str] | None = None  # names, or prefixes that end in '*'; None: all
    may_use_base: bool = True
    may_load: bool = True  # and unload, but only names on its list
    may_operate: bool = True  # sees and controls the whole server: metrics, dashboard, caches, all requests
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    weight: float = 1.0  # of the adapters it loads
    priority: int = 0  # of its requests

    def may_use(self, adapter: str) -> bool:
        """Whether an adapter's name is on the key's list. The base model has its own right, `may_use_base`."""
        if self.adapters is None or adapter in self.adapters:
            return True
        return any(entry.endswith("*") and adapter.startswith(entry[:-1]) for entry in self.adapters)


# The key of every request to a server without keys.
ANYONE = Key("anyone")


class KeyRing:
    """Keys by the digests of their secrets; the secrets themselves are not kept."""

    def __init__(self, keys: Mapping[bytes, Key] | None = None) -> None:
        self._keys = dict(keys or {})

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, secret: str) -> Key | None:
        """The key of a secret. Every digest is compared, so a wrong secret takes as long as a right one."""
        presented = digest_of(secret)
        found = None
        for digest, key in self._keys.items():
            if hmac.compare_digest(digest, presented):
                found = key
        return found


def digest_of(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
