"""An answer of an adapter says which version gave it: in a header, and where it went on under another one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rota.core.moved import Moved
from rota.core.request import Request
from rota.runtime.registry import Registry

HEADER = "x-rota-adapter-version"


def version_header(registry: Registry, requests: Iterable[Request]) -> dict[str, str]:
    """The number alone, or `name@version` of each adapter if a call asks several. Nothing for the base model."""
    ids = dict.fromkeys(request.adapter_id for request in requests)
    found = [adapter for adapter_id in ids if (adapter := registry.by_id(adapter_id))]
    if not found:
        return {}
    return {HEADER: str(found[0].version) if len(ids) == 1 else ", ".join(one.label for one in found)}


def moved_header(moves: Iterable[tuple[int, Moved]]) -> dict[str, str]:
    """All versions of an answer that was moved and is sent as a whole, in their order."""
    versions = dict.fromkeys(version for _, move in moves for version in (move.old_version, move.new_version))
    return {HEADER: ", ".join(map(str, versions))} if versions else {}


def moves_field(moves: Sequence[tuple[int, Moved]]) -> dict[str, Any]:
    """The field `rota` of an answer that was moved; nothing for all others. Each move has the choice it is of."""
    if not moves:
        return {}
    return {"rota": {"moves": [_shown(choice, move) for choice, move in moves]}}


def _shown(choice: int, move: Moved) -> dict[str, Any]:
    return {
        "choice": choice,
        "from": move.old_version,
        "to": move.new_version,
        "token": move.output_tokens,
        "kv": "keep" if move.kept_kv else "recompute",
    }
