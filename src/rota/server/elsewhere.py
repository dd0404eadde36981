"""Elsewhere lie adapters that are in no folder here, or that the server was not told of."""

from __future__ import annotations

from dataclasses import dataclass

from rota.runtime.registry import Registry
from rota.server.locating import Locate, as_asked
from rota.server.resolver import Load, Resolver, Roots
from rota.sources.prefix import Prefix


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """How the addresses of adapters are found, and below which place names are looked for."""

    locate: Locate = as_asked
    prefix: Prefix | None = None

    def resolver(self, registry: Registry, load: Load, roots: Roots) -> Resolver | None:
        """None: names that are not loaded are refused."""
        return None if self.prefix is None else Resolver(self.prefix, registry, load, roots)


HERE = Elsewhere()
