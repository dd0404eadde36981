"""A key stands for a tenant: what it may use, what it may change, and how much of the server it may take."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Collection, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

from rota.core.errors import ConfigError, RequestError
from rota.core.tenant import SOLE_TENANT, Tenant

# ── cache scopes ────────────────────────────────────────────────────────────────────────────────────────────────────
# A cache scope names the requests that find each other's KV: those of one key, or of keys that share prefixes.


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


# A priority is a head start, and one of minutes makes a request the first or the last of all that wait.
MAX_ASKED_PRIORITY = 100


@dataclass(frozen=True, slots=True)
class Key:
    """One tenant's rights, without its secret. By default it may do everything."""

    name: str
    adapters: frozenset[str] | None = None  # names, or prefixes that end in '*'; None: all
    may_use_base: bool = True
    may_load: bool = True  # and unload, but only names on its list
    may_operate: bool = True  # sees and controls the whole server: metrics, dashboard, caches, all requests
    may_set_headers: bool = True  # its calls may name the tenant of their requests and how long these may wait
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_tokens_in_flight: int | None = None  # tokens that its open answers may reserve together
    max_running: int | None = None  # answers that may hold a row; the others wait
    max_queued: int | None = None  # answers that may wait; more are refused
    max_adapters: int | None = None  # that it may have loaded, each kept version counted
    max_adapter_bytes: int | None = None  # that these may take on the server's disks
    max_uploads: int | None = None  # bodies with weights that it may send at a time
    weight: float = 1.0  # its share as a tenant
    priority: int = 0  # of its requests
    adapter_root: str | None = None  # the folder from which it loads; None: an operator's, the server's adapter root
    shares_prefixes_with: frozenset[str] | None = frozenset()  # names of other keys; None: all
    is_anyone: bool = False  # the key of a server without keys
    # Made once of the fields above.
    tenant: Tenant = field(init=False, compare=False, repr=False)
    cache_scope: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        tenant = Tenant(
            name=self.name,
            weight=self.weight,
            priority=self.priority,
            max_running=self.max_running,
            max_queued=self.max_queued,
        )
        scope = group_scope({self.name, *(self.shares_prefixes_with or ())})
        # A server without keys has one tenant and one scope, as a simulation has.
        object.__setattr__(self, "tenant", SOLE_TENANT if self.is_anyone else tenant)
        object.__setattr__(self, "cache_scope", "" if self.is_anyone else scope)

    def on_behalf_of(self, tenant: str) -> Key:
        """The same key for requests of a tenant that a gateway names; rights, limits and names stay the key's."""
        name = tenant if self.is_anyone else f"{self.name}/{tenant}"
        key = copy(self)
        object.__setattr__(key, "tenant", replace(self.tenant, name=name))
        return key

    def may_use(self, adapter: str) -> bool:
        """Whether an adapter's name is on the key's list. The base model has its own right, `may_use_base`."""
        if self.adapters is None or adapter in self.adapters:
            return True
        return any(entry.endswith("*") and adapter.startswith(entry[:-1]) for entry in self.adapters)

    def priority_for(self, asked: int | None) -> int:
        """The priority of a request. A client may ask for less than its key has. Raises RequestError for more."""
        most = MAX_ASKED_PRIORITY if self.is_anyone else self.priority
        if asked is None:
            return self.priority
        if not -MAX_ASKED_PRIORITY <= asked <= most:
            message = (
                f"priority must be between {-MAX_ASKED_PRIORITY} and {most}, the most that this key may ask for, "
                f"not {asked}; a higher one goes first."
            )
            raise RequestError.bad_field("priority", message)
        return asked

    def scope_with(self, salt: str | None) -> str:
        """The cache scope of a request, which the client's salt makes narrower."""
        return self.cache_scope if salt is None else salted_scope(self.cache_scope, salt)


# The names of keys that differ between two rings: those that were added, removed and changed.
KeyChanges = dict[str, list[str]]

# A client that needs no key to ask whether the server lives.
PROBE = Key("probe", adapters=frozenset(), may_use_base=False, may_load=False, may_operate=False, may_set_headers=False)
# The key of every request to a server without keys.
ANYONE = Key("anyone", is_anyone=True)


class KeyRing:
    """Keys by the digests of their secrets; the secrets themselves are not kept."""

    def __init__(self, keys: Mapping[bytes, Key] | None = None) -> None:
        self._keys = dict(keys or {})
        self._named = {key.name: (digest, key) for digest, key in self._keys.items()}

    def __bool__(self) -> bool:
        return bool(self._keys)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys.values())

    def named(self, name: str) -> Key | None:
        """The key of a name."""
        return self._named[name][1] if name in self._named else None

    def changes_to(self, later: KeyRing) -> KeyChanges:
        """What another ring has, lacks, or has with another secret or other rights. Names only."""
        both = self._named.keys() & later._named.keys()
        return {
            "added": sorted(later._named.keys() - both),
            "removed": sorted(self._named.keys() - both),
            "changed": sorted(name for name in both if self._named[name] != later._named[name]),
        }

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
