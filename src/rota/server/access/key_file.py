"""The key file gives every key its rights in TOML, and is read again when it changes. No right is a default."""

from __future__ import annotations

import asyncio
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rota.core.errors import AdapterError, ConfigError
from rota.observe.audit import log_keys, log_refused_keys
from rota.server.access.keys import MAX_ASKED_PRIORITY, Key, KeyChanges, KeyRing, digest_of, groups_of
from rota.sources.address import has_scheme, parse_address

# ── roots ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# A key's adapter root is the one folder or address from which the key loads, below the server's adapter root.


def with_root(key: Key, server_root: str | None) -> Key:
    """The key, its root as an address, or as a path with links followed.

    Raises ConfigError for a root that the key may not have.
    """
    if key.adapter_root is not None:
        return replace(key, adapter_root=_resolved(key.name, key.adapter_root, server_root))
    if key.may_load and not key.may_operate:
        start = "" if server_root else "start the server with --adapter-root DIR and "
        raise ConfigError(
            f"'{key.name}' may load adapters and has no folder of its own: {start}add the line "
            f'adapter_root = "NAME" to it, where NAME is a folder in the server\'s adapter root. Without may_load it '
            "needs none."
        )
    return key


def _resolved(name: str, root: str, server_root: str | None) -> str:
    if has_scheme(root) or (server_root is not None and has_scheme(server_root)):
        return _address(name, root, server_root)
    if server_root is None:
        raise ConfigError(f"'{name}' has an adapter_root, and the server has none; start it with --adapter-root DIR.")
    try:
        outer = Path(server_root).resolve()
        inner = (outer / root).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"'{name}': adapter_root {root!r} is no path that can be followed ({error}).") from error
    if outer not in inner.parents:
        raise ConfigError(
            f"'{name}': adapter_root {root!r} is {inner}, which is not below the server's adapter root {outer}; name a "
            "folder in it."
        )
    return str(inner)


def _address(name: str, root: str, server_root: str | None) -> str:
    """A key may have the address of its own root where the server has none."""
    try:
        outer = parse_address(root) if server_root is None else parse_address(server_root)
        inner = parse_address(root if has_scheme(root) else f"{outer}/{root}")
    except AdapterError as error:
        raise ConfigError(f"'{name}': adapter_root {root!r}: {error}") from error
    if not inner.lies_in(outer) or (inner == outer and server_root is not None):
        raise ConfigError(
            f"'{name}': adapter_root {root!r} is {inner}, which is not below the server's adapter root {outer}; name a "
            "place in it."
        )
    return str(inner.plain)


# ── key file ────────────────────────────────────────────────────────────────────────────────────────────────────────
# The key file gives every key its rights in TOML; a right that is not given is not there.
#
# [keys.acme]
# key = "sk-acme-…"                    # or key_sha256, so that the file holds no secret
# adapters = ["pirate", "acme-*"]      # or "all"
# may_use_base = true
# may_load = true
# adapter_root = "acme"                # its folder below the server's --adapter-root; needed by may_load
# may_operate = false
# may_set_headers = false              # for the key of a gateway: x-llm-d-inference-fairness-id, x-llm-d-slo-ttft-ms
# requests_per_minute = 600
# tokens_per_minute = 200_000
# max_tokens_in_flight = 50_000
# max_running = 32
# max_queued = 256
# max_adapters = 100
# max_adapter_bytes = 10_000_000_000
# max_uploads = 2
# weight = 2.0                         # its share as a tenant, not the weight of adapters that it loads
# priority = 1
# shares_prefixes_with = ["birds"]     # or "all"

# Shares are quotients of weights: beyond this, a tenant would wait for ever, or numbers would no longer differ.
MOST_WEIGHT = 1e6


def read_keys(secrets: Iterable[str], path: str | None, adapter_root: str | None = None) -> KeyRing:
    """The keys of --api-key, which may do everything, and those of --api-key-file.

    `adapter_root` is the server's. Raises ConfigError for a key whose own root is not below it.
    """
    named = [(digest_of(_checked_secret(secret, "api_key")), Key(f"key {n}")) for n, secret in enumerate(secrets, 1)]
    if path is not None:
        named += _read_file(Path(path), adapter_root)
    keys: dict[bytes, Key] = {}
    for digest, key in named:
        if digest in keys:
            raise ConfigError(f"'{keys[digest].name}' and '{key.name}' have the same key; give each its own.")
        keys[digest] = key
    return KeyRing(_grouped(keys))


def _grouped(keys: dict[bytes, Key]) -> dict[bytes, Key]:
    """The same keys; each lists all keys that it shares prefixes with, also those that list it."""
    names = [key.name for key in keys.values()]
    for name in names:
        if not name:
            raise ConfigError("A key has an empty name; give it one, as in [keys.NAME].")
        if names.count(name) > 1:
            raise ConfigError(
                f"Two keys are named '{name}'; rename the key of the key file. --api-key names 'key 1', 'key 2', …."
            )
    groups = groups_of({key.name: key.shares_prefixes_with for key in keys.values()})
    return {digest: replace(key, shares_prefixes_with=groups[key.name] - {key.name}) for digest, key in keys.items()}


def _read_file(path: Path, adapter_root: str | None) -> list[tuple[bytes, Key]]:
    try:
        mode = os.stat(path).st_mode
        content = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"Cannot read the key file {path}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, or numbers and lists beyond all measure
        raise ConfigError(f"The key file {path} is not TOML: {error}.") from error
    try:
        tables = _tables(content)
        _check_permissions(mode, any("key" in table for table in tables.values()))
        entries = [_entry(name, table) for name, table in tables.items()]
        return [(digest, with_root(key, adapter_root)) for digest, key in entries]
    except ConfigError as error:
        raise ConfigError(f"In the key file {path}: {error}") from None


def _check_permissions(mode: int, holds_secrets: bool) -> None:
    """The file's group may read it, because containers mount secrets that way. Other users may not."""
    if mode & stat.S_IWOTH:
        raise ConfigError("every user of this machine may write to it and so take rights; chmod o-w.")
    if holds_secrets and mode & stat.S_IROTH:
        raise ConfigError(
            "every user of this machine may read its keys; chmod o-r, or store key_sha256 in place of key."
        )


def _tables(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    for name in content:
        if name != "keys":
            raise ConfigError(f"'{name}' is not known here; a key is a table [keys.NAME].")
    tables = content.get("keys", {})
    if not isinstance(tables, dict) or not tables:
        raise ConfigError("there are no keys; a key is a table [keys.NAME].")
    for name, table in tables.items():
        if not isinstance(table, dict):
            # Its value is not repeated: it may be a secret.
            raise ConfigError(f"keys.{name} must be a table [keys.{name}].")
    return tables


def _entry(name: str, table: dict[str, Any]) -> tuple[bytes, Key]:
    fields = ("key", "key_sha256", *_RULES)
    for field in table:
        if field not in fields:
            raise ConfigError(f"'{name}' has a field '{field}'; the fields are {', '.join(fields)}.")
    digest = _digest(name, table)
    key = Key(name, **{field: rule.read(name, table, field) for field, rule in _RULES.items()})
    for entry in key.adapters or ():
        if "*" in entry[:-1]:
            raise ConfigError(f"'{name}': '*' may stand at the end of a name only, not as in '{entry}'.")
    return digest, key


def _digest(name: str, table: dict[str, Any]) -> bytes:
    if ("key" in table) == ("key_sha256" in table):
        raise ConfigError(f"'{name}' needs either key or key_sha256.")
    if "key" in table:
        return digest_of(_checked_secret(table["key"], f"'{name}': key"))
    text = table["key_sha256"]
    if not isinstance(text, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        raise ConfigError(f"'{name}': key_sha256 must be 64 hexadecimal digits (printf %s KEY | sha256sum).")
    return bytes.fromhex(text)


def _checked_secret(secret: Any, what: str) -> str:
    """A key that a header can carry. The error does not repeat the key."""
    if not isinstance(secret, str) or not re.fullmatch(r"[!-~]+", secret):
        raise ConfigError(f"{what} must be a text of letters, digits and signs in ASCII, without spaces.")
    return secret


@dataclass(frozen=True, slots=True)
class FieldRule:
    """What a field is if it is left out, and what it may be: in code, in words, and in the key."""

    default: Any
    is_right: Callable[[Any], bool]
    wanted: str
    kept: Callable[[Any], Any] = lambda value: value

    def read(self, name: str, table: dict[str, Any], field: str) -> Any:
        if field not in table:
            return self.default
        if not self.is_right(value := table[field]):
            raise ConfigError(f"'{name}': {field} must be {self.wanted}, not {value!r}.")
        return self.kept(value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def _all_or_names(listed: str | list[str]) -> frozenset[str] | None:
    return None if listed == "all" else frozenset(listed)


def _is_weight(value: Any) -> bool:
    return type(value) in (int, float) and 1 / MOST_WEIGHT <= value <= MOST_WEIGHT


_NAMES = FieldRule(
    frozenset(), lambda it: it == "all" or (_is_texts(it) and all(it)), "'all' or a list of names", _all_or_names
)
_KEYS = FieldRule(frozenset(), lambda it: it == "all" or _is_texts(it), "'all' or a list of keys' names", _all_or_names)
_FLAG = FieldRule(False, lambda it: isinstance(it, bool), "true or false")
_ROOT = FieldRule(None, lambda it: isinstance(it, str) and bool(it.strip()), "the path of a folder")
_LIMIT = FieldRule(None, lambda it: type(it) is int and it >= 1, "a whole number of at least 1")
_WEIGHT = FieldRule(1.0, _is_weight, "a finite number above 0, from 1e-6 to 1e6", float)
_PRIORITY = FieldRule(
    0,
    lambda it: type(it) is int and abs(it) <= MAX_ASKED_PRIORITY,
    f"a whole number from -{MAX_ASKED_PRIORITY} to {MAX_ASKED_PRIORITY}",
)

# How each field is read; the error for an unknown field names them in this order.
_RULES = {
    "adapters": _NAMES,
    "may_use_base": _FLAG,
    "may_load": _FLAG,
    "adapter_root": _ROOT,
    "may_operate": _FLAG,
    "may_set_headers": _FLAG,
    "requests_per_minute": _LIMIT,
    "tokens_per_minute": _LIMIT,
    "max_tokens_in_flight": _LIMIT,
    "max_running": _LIMIT,
    "max_queued": _LIMIT,
    "max_adapters": _LIMIT,
    "max_adapter_bytes": _LIMIT,
    "max_uploads": _LIMIT,
    "weight": _WEIGHT,
    "priority": _PRIORITY,
    "shares_prefixes_with": _KEYS,
}


# ── key source ──────────────────────────────────────────────────────────────────────────────────────────────────────
# A key source is where a server's keys come from. It is read again when its file changes or a signal asks for it.

LOOK_EVERY_S = 1.0

# When a file was last written, and which file it is: a new file under the old name is a change too.
Stamp = tuple[int, ...] | None


class KeySource:
    """Where a server's keys come from: --api-key and --api-key-file."""

    def __init__(self, secrets: Sequence[str], path: str | None, adapter_root: str | None = None) -> None:
        """`adapter_root` is the server's."""
        self.path = path
        self._secrets, self._adapter_root = secrets, adapter_root
        self._stamp: Stamp = None
        self._is_asked = False

    def read(self) -> KeyRing:
        """The keys as they are now. Raises ConfigError. Blocks on the disk."""
        self._is_asked = False
        self._stamp = self._stamp_now()  # before the read: a write during the read is a change
        return read_keys(self._secrets, self.path, self._adapter_root)

    def ask(self) -> None:
        """Have the file read again soon, changed or not. May be called by a signal handler."""
        self._is_asked = True

    async def watch(self, replace_keys: Callable[[KeyRing], KeyChanges], every_s: float = LOOK_EVERY_S) -> None:
        """Give the server new keys until cancelled. Open requests go on to their end, also those of a removed key.

        Bad keys change nothing. The disk is read in a thread: a slow one delays no request.
        """
        while True:
            await asyncio.sleep(every_s)
            cause, keys = await asyncio.to_thread(self._read_again)
            if isinstance(keys, KeyRing):
                log_keys(replace_keys(keys), cause)
            elif keys:
                log_refused_keys(keys, cause)

    def _read_again(self) -> tuple[str, KeyRing | str]:
        """Why the file was read, and the keys or the reason against them.

        Empty if it was not read, or was written meanwhile: that is for the next look.
        """
        cause = "SIGHUP" if self._is_asked else "the key file changed" if self._has_changed() else ""
        keys: KeyRing | str = ""
        if cause:
            try:
                keys = self.read()
            except ConfigError as error:
                keys = str(error)
        return cause, "" if self._has_changed() else keys

    def _has_changed(self) -> bool:
        """Whether the file was written since the last read."""
        return self._stamp_now() != self._stamp

    def _stamp_now(self) -> Stamp:
        if self.path is None:
            return None
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_dev)
