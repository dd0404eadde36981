"""The key file gives every key its rights in TOML, and is read again when it changes. No right is a default."""

from __future__ import annotations

import asyncio
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
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
    fields = ("key", "key_sha256", *_READERS)
    for field in table:
        if field not in fields:
            raise ConfigError(f"'{name}' has a field '{field}'; the fields are {', '.join(fields)}.")
    return _digest(name, table), Key(name, **{field: read(name, table, field) for field, read in _READERS.items()})


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


def _adapters(name: str, table: dict[str, Any], field: str) -> frozenset[str] | None:
    listed = table.get(field, [])
    if listed == "all":
        return None
    if not isinstance(listed, list) or not all(isinstance(entry, str) and entry for entry in listed):
        raise ConfigError(f"'{name}': {field} must be 'all' or a list of names, not {listed!r}.")
    for entry in listed:
        if "*" in entry[:-1]:
            raise ConfigError(f"'{name}': '*' may stand at the end of a name only, not as in '{entry}'.")
    return frozenset(listed)


def _shares(name: str, table: dict[str, Any], field: str) -> frozenset[str] | None:
    listed = table.get(field, [])
    if listed == "all":
        return None
    if not isinstance(listed, list) or not all(isinstance(entry, str) for entry in listed):
        raise ConfigError(f"'{name}': {field} must be 'all' or a list of keys' names, not {listed!r}.")
    return frozenset(listed)


def _flag(name: str, table: dict[str, Any], field: str) -> bool:
    value = table.get(field, False)
    if not isinstance(value, bool):
        raise ConfigError(f"'{name}': {field} must be true or false, not {value!r}.")
    return value


def _root(name: str, table: dict[str, Any], field: str) -> str | None:
    value = table.get(field)
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise ConfigError(f"'{name}': {field} must be the path of a folder, not {value!r}.")
    return value


def _limit(name: str, table: dict[str, Any], field: str) -> int | None:
    value = table.get(field)
    if value is not None and (type(value) is not int or value < 1):
        raise ConfigError(f"'{name}': {field} must be a whole number of at least 1, not {value!r}.")
    return value


def _weight(name: str, table: dict[str, Any], field: str) -> float:
    value = table.get(field, 1.0)
    if type(value) not in (int, float) or not 1 / MOST_WEIGHT <= value <= MOST_WEIGHT:
        raise ConfigError(f"'{name}': {field} must be a finite number above 0, from 1e-6 to 1e6, not {value!r}.")
    return float(value)


def _priority(name: str, table: dict[str, Any], field: str) -> int:
    value = table.get(field, 0)
    if type(value) is not int or abs(value) > MAX_ASKED_PRIORITY:
        most = MAX_ASKED_PRIORITY
        raise ConfigError(f"'{name}': {field} must be a whole number from -{most} to {most}, not {value!r}.")
    return value


# How each field is read; the error for an unknown field names them in this order.
_READERS: dict[str, Callable[[str, dict[str, Any], str], Any]] = {
    "adapters": _adapters,
    "may_use_base": _flag,
    "may_load": _flag,
    "adapter_root": _root,
    "may_operate": _flag,
    "may_set_headers": _flag,
    "requests_per_minute": _limit,
    "tokens_per_minute": _limit,
    "max_tokens_in_flight": _limit,
    "max_running": _limit,
    "max_queued": _limit,
    "max_adapters": _limit,
    "max_adapter_bytes": _limit,
    "max_uploads": _limit,
    "weight": _weight,
    "priority": _priority,
    "shares_prefixes_with": _shares,
}


# ── key source ──────────────────────────────────────────────────────────────────────────────────────────────────────
# A key source is where a server's keys come from, and knows when they have to be read again.

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

    def cause_to_read(self) -> str:
        """Why the file is to be read again, or an empty text. Blocks on the disk."""
        if self._is_asked:
            return "SIGHUP"
        return "the key file changed" if self.has_changed() else ""

    def has_changed(self) -> bool:
        """Whether the file was written since the last read. Blocks on the disk."""
        return self._stamp_now() != self._stamp

    def _stamp_now(self) -> Stamp:
        if self.path is None:
            return None
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_dev)


# ── key watch ───────────────────────────────────────────────────────────────────────────────────────────────────────
# The key watch reads the key file again when the file changes or a signal asks for it; bad keys change nothing.

LOOK_EVERY_S = 1.0


class KeyWatch:
    """Gives the server new keys while it runs. Open requests go on to their end, also those of a removed key."""

    def __init__(
        self, source: KeySource, replace_keys: Callable[[KeyRing], KeyChanges], every_s: float = LOOK_EVERY_S
    ) -> None:
        self._source, self._replace_keys, self._every_s = source, replace_keys, every_s

    async def run(self) -> None:
        """Look until cancelled. The disk is read in a thread: a slow one delays no request."""
        while True:
            await asyncio.sleep(self._every_s)
            if cause := await asyncio.to_thread(self._source.cause_to_read):
                await self._take_over(cause)

    async def _take_over(self, cause: str) -> None:
        keys, refusal = await asyncio.to_thread(self._read)
        if keys is None and not refusal:
            return
        if keys is None:
            log_refused_keys(refusal, cause)
            return
        changes = self._replace_keys(keys)
        log_keys(changes.added, changes.removed, changes.changed, cause)

    def _read(self) -> tuple[KeyRing | None, str]:
        """The keys, or the reason against them; neither if the file was written meanwhile, for the next look."""
        keys, refusal = None, ""
        try:
            keys = self._source.read()
        except ConfigError as error:
            refusal = str(error)
        return (None, "") if self._source.has_changed() else (keys, refusal)
