"""A job is some bytes that a tenant may have written, on their way to a process of the reading room and back."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """How many jobs may wait, and how many bytes they may have."""

    jobs: int
    size: int

    def have_room(self, waiting: Collection[RoomJob], size: int) -> bool:
        return len(waiting) < self.jobs and sum(job.size for job in waiting) + size <= self.size


# How many jobs of a kind may wait.
OF_KEY, OF_ALL = QueueBounds(32, 64 << 20), QueueBounds(256, 512 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How jobs are done that are alike, and what one of them may take."""

    work: Callable[..., bytes]  # gets what the room has at hand, and the job's parts; it travels by its name
    wall_s: float
    cpu_s: float | None = None  # None: as long as the clock allows
    memory_bytes: int = 2 << 30  # of address space, beside what the process had before
    spares: int = 0  # processes that jobs of this kind leave to others
    of_key: QueueBounds = OF_KEY
    of_all: QueueBounds = OF_ALL


class JobOutcome(Enum):
    DONE = "done"
    TOO_LONG = "too long"  # it took more processor time than its kind may
    OVERDUE = "overdue"  # it took more time by the clock, perhaps because the machine is busy
    TOO_LARGE = "too large"  # it needs more memory than its kind may have
    DIED = "died"  # its process was killed, or crashed
    FAILED = "failed"  # a bug: the content is a traceback
    STOPPING = "stopping"  # the room is closed


@dataclass(frozen=True, slots=True)
class JobReply:
    outcome: JobOutcome
    content: bytes = b""


@dataclass(frozen=True, slots=True, eq=False)
class RoomJob:
    """Waits, or is being done."""

    key: str  # whose it is
    kind: Kind
    parts: tuple[bytes, ...]
    reply: Future[JobReply] = field(default_factory=Future)

    @property
    def size(self) -> int:
        return sum(map(len, self.parts))


# Makes what jobs need at hand, of an argument; it travels by its name.
Prepare = Callable[[Any], Any]
