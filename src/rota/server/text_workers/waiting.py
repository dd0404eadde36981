"""Jobs wait in one queue for each key, and keys take turns."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    """A job as the queues see it."""

    @property
    def key(self) -> str: ...

    @property
    def size(self) -> int: ...


Job = TypeVar("Job", bound=Sized)


@dataclass(frozen=True, slots=True)
class Bounds:
    """How many jobs may wait, and how many bytes they may have."""

    jobs: int
    size: int

    def have_room(self, waiting: Collection[Sized], size: int) -> bool:
        return len(waiting) < self.jobs and sum(job.size for job in waiting) + size <= self.size


class Waiting(Generic[Job]):
    """The jobs that wait, and how many jobs of each key run. `most_running`: how many of a key may run at a time.

    A key without a waiting job may add one of any size, however many jobs of other keys wait.
    """

    def __init__(self, most_running: Callable[[str], int], of_key: Bounds, of_all: Bounds) -> None:
        self._most_running = most_running
        self._of_key, self._of_all = of_key, of_all
        # In the order of turns: a key that had its turn goes to the end.
        self._by_key: dict[str, deque[Job]] = {}
        self._running: Counter[str] = Counter()

    def has_room(self, key: str, size: int) -> bool:
        """Whether one more job may wait."""
        own = self._by_key.get(key)
        return not own or (self._of_key.have_room(own, size) and self._of_all.have_room(self._all(), size))

    def add(self, job: Job) -> None:
        self._by_key.setdefault(job.key, deque()).append(job)

    def take(self) -> Job | None:
        """The next job that may run. It counts as running until `finished`."""
        may_run = (key for key in self._by_key if self._running[key] < self._most_running(key))
        if (key := next(may_run, None)) is None:
            return None
        jobs = self._by_key.pop(key)
        job = jobs.popleft()
        if jobs:
            self._by_key[key] = jobs
        self._running[key] += 1
        return job

    def finished(self, key: str) -> None:
        self._running[key] -= 1
        if not self._running[key]:
            del self._running[key]

    def clear(self) -> list[Job]:
        """Takes out all jobs that wait."""
        jobs = self._all()
        self._by_key.clear()
        return jobs

    def _all(self) -> list[Job]:
        return [job for jobs in self._by_key.values() for job in jobs]
