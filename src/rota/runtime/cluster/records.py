"""What the front, its driver and an engine say to each other, and what an engine needs of a machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rota.core.config import ModelConfig

# ── needs ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# What a replica needs of a machine, what the cluster has, and how many replicas that holds.


@dataclass(frozen=True, slots=True)
class Need:
    """The devices of one replica, all on one machine: GPUs, or processors if there are no GPUs in it."""

    gpus: int = 0
    cpus: int = 0

    def __str__(self) -> str:
        return _counted(self.gpus, "GPU") if self.gpus else _counted(self.cpus, "CPU")

    @property
    def bundle(self) -> dict[str, float]:
        """As Ray names them."""
        return {"GPU": float(self.gpus)} if self.gpus else {"CPU": float(self.cpus)}


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster, and all its devices."""

    name: str
    gpus: int = 0
    cpus: int = 0

    def holds(self, need: Need) -> int:
        """How many replicas find room on an empty machine."""
        return self.gpus // need.gpus if need.gpus else self.cpus // need.cpus


@dataclass(frozen=True, slots=True)
class Sight:
    """The cluster as it was last seen: its machines, and what of all devices is free. Told when it changes."""

    nodes: tuple[Node, ...] = ()
    free_gpus: int = 0
    free_cpus: int = 0

    def holds(self, need: Need) -> int:
        """How many replicas the whole cluster holds if no other program uses it."""
        return sum(node.holds(need) for node in self.nodes)

    def has_room_for(self, need: Need) -> int:
        """How many replicas find room now; what is free on several machines may be less than it looks."""
        return self.free_gpus // need.gpus if need.gpus else self.free_cpus // need.cpus

    def most_on_one(self, need: Need) -> int:
        """How many replicas may share one machine."""
        return max([1, *(node.holds(need) for node in self.nodes)])

    def described(self, need: Need) -> str:
        """What there is of the kind of device that is needed, by machine."""
        kind = "GPU" if need.gpus else "CPU"
        counts = [(node.name, node.gpus if need.gpus else node.cpus) for node in self.nodes]
        listed = ", ".join(f"{_counted(count, kind)} on {name}" for name, count in counts if count)
        return f"{listed} ({self.free_gpus if need.gpus else self.free_cpus} free)" if listed else f"no {kind}"


def need_of(config: ModelConfig, sight: Sight) -> Need:
    """What one replica needs. Without a number of threads it takes a whole machine, the smallest one."""
    has_gpus = any(node.gpus for node in sight.nodes)
    if config.device == "cuda" or (config.device == "auto" and has_gpus):
        return Need(gpus=config.tensor_parallel_size)
    if config.cpu_threads != "auto":
        return Need(cpus=config.cpu_threads * config.tensor_parallel_size)
    return Need(cpus=min((node.cpus for node in sight.nodes if node.cpus), default=1))


def shortage(need: Need, replicas: int, sight: Sight) -> str:
    """Why the cluster cannot hold so many replicas, ever; empty if it can."""
    if sight.holds(need) >= replicas:
        return ""
    wanted = f"One replica needs {need} on one machine"
    if replicas > 1:
        wanted = f"{replicas} replicas are asked for, and each needs {need} on one machine"
    return f"{wanted}; the cluster has {sight.described(need)}."


def waiting(need: Need, sight: Sight) -> str:
    """Why a replica has not begun."""
    return f"It has no place to run: it needs {need} on one machine, and the cluster has {sight.described(need)}."


def _counted(count: int, kind: str) -> str:
    return f"1 {kind}" if count == 1 else f"{count} {kind}s"


# ── invitation ──────────────────────────────────────────────────────────────────────────────────────────────────────
# An invitation tells an engine elsewhere where its front listens; its answer tells where the engine does.
#
# Only public keys travel in them. A secret key stays in the process that made it.


@dataclass(frozen=True, slots=True)
class Invitation:
    """Where the front takes events: "tcp://10.0.0.1:41234", and its public key in Z85."""

    events: str
    front_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Where the engine takes messages, its public key in Z85, and which process on which machine it is."""

    messages: str
    engine_key: str
    node: str
    pid: int


OnJoined = Callable[[Joined], None]


# ── records ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# What the front tells its driver, and what the driver tells the front.


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineJob:
    """What a machine must know to run an engine. What only equal versions can read is in bytes."""

    versions: dict[str, str]  # of the front; a machine with others refuses
    facts: dict[str, str]  # of the model's files, as the front has them
    engine: bytes  # pickled: how the device is built, and the engine's config
    threads: int | None = None  # for all replicas of the machine together; None: as many as it has processors


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOrder:
    """Find a place for an engine and run it there."""

    number: int
    need: Need
    job: EngineJob
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


Told = Connected | Away | Sight | Silent | Began | Listens | Ended
Orders = EngineOrder | Cancel | Leave
