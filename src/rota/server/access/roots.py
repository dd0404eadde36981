"""A key's adapter root is the one folder or address from which the key loads, below the server's adapter root."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rota.core.errors import AdapterError, ConfigError
from rota.server.access.keys import Key
from rota.sources.address import has_scheme, parse_address


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
