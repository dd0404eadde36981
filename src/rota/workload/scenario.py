"""A scenario says who asks what and when, in a file that a person can read."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from rota.core.errors import ConfigError

# Whom the next request asks for: any adapter; few of them often, as 1/rank^exponent or each `skew` times as often as
# the next one; or one after the other.
Distribution = Literal["uniform", "zipf", "skewed", "distinct"]


@dataclass(frozen=True, slots=True)
class Client:
    """One source of requests: open loop at a rate, or closed loop with so many open at a time."""

    requests: int
    rate_per_s: float | None = None
    concurrency: int | None = None
    prompt_tokens: tuple[int, int] = (1, 512)
    output_tokens: tuple[int, int] = (1, 512)
    adapters: int = 0  # asked for by number, 1 to this; 0: the base model alone
    distribution: Distribution = "uniform"
    zipf_exponent: float = 1.1
    skew: float = 1.5
    base_share: float = 0.0
    cancel_share: float = 0.0  # of clients that leave at a random moment
    cancel_within_s: float = 10.0

    def __post_init__(self) -> None:
        if (self.rate_per_s is None) == (self.concurrency is None):
            raise ConfigError("A client needs either rate_per_s or concurrency, and not both.")
        if self.distribution not in get_args(Distribution):
            raise ConfigError(
                f"distribution must be one of {', '.join(get_args(Distribution))}, not {self.distribution!r}."
            )
        for name in ("prompt_tokens", "output_tokens"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise ConfigError(f"{name} must be [low, high] with 1 <= low <= high, not [{low}, {high}].")


@dataclass(frozen=True, slots=True)
class Scenario:
    """Clients that ask at the same time, and what the server was given to serve them with."""

    name: str
    about: str = ""
    slots: int = 0
    max_running_requests: int = 256
    kv_blocks: int = 16_384
    clients: tuple[Client, ...] = field(default_factory=tuple)
    guests: int = 0  # adapters that are loaded, asked once and unloaded while all others are served
    guest_every_s: float = 2.0

    def __post_init__(self) -> None:
        if self.guests and not self.adapters:
            raise ConfigError("guests are copies of adapters, and no client asks for one.")

    @property
    def adapters(self) -> int:
        return max((client.adapters for client in self.clients), default=0)


def read_scenario(path: Path) -> Scenario:
    """Read a scenario file; unknown names in it are errors."""
    try:
        table = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"There is no scenario file {path}.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not a TOML file: {error}.") from None
    clients = tuple(_build(Client, client, path) for client in table.pop("clients", []))
    if not clients:
        raise ConfigError(f"{path} has no [[clients]]: nobody would ask anything.")
    scenario: Scenario = _build(Scenario, {"name": path.stem, **table, "clients": clients}, path)
    return scenario


def _build(kind: type[Any], table: dict[str, Any], path: Path) -> Any:
    known = {one.name for one in fields(kind)}
    for name in table:
        if name not in known:
            raise ConfigError(f"{path}: '{name}' is not a field of {kind.__name__.lower()}; known are {sorted(known)}.")
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in table.items()})
