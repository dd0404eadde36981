"""An answer of an adapter says in a header which version gave it."""

from __future__ import annotations

from collections.abc import Iterable

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
