"""Jobs wait in one queue for each key, and keys take turns."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from rota.runtime.room.job import Job, Kind


class Waiting:
    """The jobs that wait, and how many run. Of the processes that a kind of jobs may have, a key leaves one to others.

    A key without a waiting job of a kind may add one of any size, however many jobs of other keys wait.
    """

    def __init__(self, processes: int, only_key: str) -> None:
        """`only_key` is the one that need not share."""
        self._processes, self._only_key = processes, only_key
        # In the order of turns: a key that had its turn goes to the end.
        self._by_key: dict[str, deque[Job]] = {}
        self._running: Counter[tuple[Kind, str]] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._by_key.values()))

    def has_room(self, job: Job) -> bool:
        """Whether one more job may wait."""
        alike = [one for one in self._all() if one.kind is job.kind]
        own = [one for one in alike if one.key == job.key]
        return not own or (job.kind.of_key.have_room(own, job.size) and job.kind.of_all.have_room(alike, job.size))

    def add(self, job: Job) -> None:
        self._by_key.setdefault(job.key, deque()).append(job)

    def take(self) -> Job | None:
        """The next job that may run. It counts as running until `finished`."""
        for key, jobs in self._by_key.items():
            if job := next(filter(self._may_run, jobs), None):
                jobs.remove(job)
                del self._by_key[key]
                if jobs:
                    self._by_key[key] = jobs
                self._running[job.kind, key] += 1
                return job
        return None

    def finished(self, job: Job) -> None:
        self._running[job.kind, job.key] -= 1
        if not self._running[job.kind, job.key]:
            del self._running[job.kind, job.key]

    def clear(self) -> list[Job]:
        """Takes out all jobs that wait."""
        jobs = list(self._all())
        self._by_key.clear()
        return jobs

    def _may_run(self, job: Job) -> bool:
        places = max(1, self._processes - job.kind.spares)
        own = places if job.key == self._only_key else max(1, places - 1)
        alike = sum(count for (kind, _), count in self._running.items() if kind is job.kind)
        return alike < places and self._running[job.kind, job.key] < own

    def _all(self) -> Iterator[Job]:
        return (job for jobs in self._by_key.values() for job in jobs)
