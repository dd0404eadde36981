"""A tenant is a customer of the server: the owner of one key."""

from __future__ import annotations

from dataclasses import dataclass

from rota.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """What the scheduler knows of a key: its name, its share of the device, and how much it may hold at once."""

    name: str
    weight: float = 1.0  # its share of rows, KV, prefill budget and slots relative to other tenants
    priority: int = 0  # a tenant with a higher one goes first for a while
    max_running: int | None = None  # sequences that may hold a row; the others wait
    max_queued: int | None = None  # requests that may wait; more are refused

    def __post_init__(self) -> None:
        if not self.weight > 0.0:
            raise ConfigError(f"weight of tenant '{self.name}' must be above 0, not {self.weight}.")


# The tenant of every request to a server without keys, and of the simulator's scenarios without tenants.
SOLE_TENANT = Tenant(name="")
