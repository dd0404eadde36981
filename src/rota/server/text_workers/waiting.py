"""Jobs wait in one queue for each key, and keys take turns."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    """A job as the queues see it."""

    @property
    def key(self) -> str: ...

    @property
    def size(self) -> int: ...


Job = TypeVar("Job", bound=Sized)

# A key's jobs that may wait, and all keys' jobs: how many, and their bytes. The first job of a key may have any size.
KEY_JOBS, KEY_BYTES = 128, 64 * 2**20
ALL_JOBS, ALL_BYTES = 1024, 512 * 2**20


class Waiting(Generic[Job]):
    """The jobs that wait, and how many jobs of each key run. `most_running`: how many of a key may run at a time."""

    def __init__(self, most_running: Callable[[str], int]) -> None:
        self._most_running = most_running
        # In the order of turns: a key that had its turn goes to the end.
        self._by_key: dict[str, deque[Job]] = {}
        self._running: Counter[str] = Counter()

    def has_room(self, key: str, size: int) -> bool:
        """Whether one more job may wait."""
        own = self._by_key.get(key, ())
        everything = [job for jobs in self._by_key.values() for job in jobs]
        return not own or (
            len(own) < KEY_JOBS
            and sum(job.size for job in own) + size <= KEY_BYTES
            and len(everything) < ALL_JOBS
            and sum(job.size for job in everything) + size <= ALL_BYTES
        )

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
        jobs = [job for jobs in self._by_key.values() for job in jobs]
        self._by_key.clear()
        return jobs
