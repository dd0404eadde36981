"""What the front tells its driver, and what the driver tells the front."""

from __future__ import annotations

from dataclasses import dataclass

from rota.runtime.cluster.needs import Need, Sight
from rota.runtime.remote.invitation import Invitation, Joined


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a machine must know to run an engine. What only equal versions can read is in bytes."""

    versions: dict[str, str]  # of the front; a machine with others refuses
    facts: dict[str, str]  # of the model's files, as the front has them
    engine: bytes  # pickled: how the device is built, and the engine's config
    threads: int | None = None  # for all replicas of the machine together; None: as many as it has processors


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Find a place for an engine and run it there."""

    number: int
    need: Need
    job: Job
    invitation: Invitation


@dataclass(frozen=True, slots=True)
class Cancel:
    """End an engine, or stop looking for its place."""

    number: int


@dataclass(frozen=True, slots=True)
class Leave:
    """Give back all places, and end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """The driver has joined the cluster, from a machine with this address."""

    host: str


@dataclass(frozen=True, slots=True)
class Away:
    """The driver cannot join the cluster, or has lost it; a sentence says why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Seen:
    """What the cluster has; told when it changes."""

    sight: Sight


@dataclass(frozen=True, slots=True)
class Silent:
    """The cluster's head does not answer. Engines go on, and Ray tries to reach it."""


@dataclass(frozen=True, slots=True)
class Began:
    """An engine has its place, on this machine."""

    number: int
    node: str


@dataclass(frozen=True, slots=True)
class Listens:
    """An engine takes messages."""

    number: int
    joined: Joined


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """An engine has ended, or never begins."""

    number: int
    exit_code: int | None = None
    why: str = ""  # if it did not end by itself
    is_refused: bool = False  # its machine will never run it as it is


Told = Connected | Away | Seen | Silent | Began | Listens | Ended
Orders = Order | Cancel | Leave
