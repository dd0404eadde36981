"""Side by side, a few jobs take less time than one after the other, where they wait for memory and disks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise

# More threads than this read no faster: memory is the limit.
MOST_THREADS = 8

Job = Callable[[], None]


def threads_for_reads() -> int:
    """Half of the processors: the others launch steps and serve clients."""
    return max(1, min(MOST_THREADS, (os.cpu_count() or 1) // 2))


def cut_evenly(count: int, parts: int) -> list[range]:
    """The numbers below `count` in so many ranges, or in fewer if there are not so many."""
    parts = max(1, min(count, parts))
    bounds = [count * part // parts for part in range(parts + 1)]
    return [range(first, last) for first, last in pairwise(bounds)]


def side_by_side(jobs: Sequence[Job]) -> None:
    """Returns when all jobs are done, and raises the first error of one. The last job runs in this thread."""
    errors: list[Exception] = []

    def work(job: Job) -> None:
        try:
            job()
        except Exception as error:  # the border of a thread: the caller raises it
            errors.append(error)

    # Daemons of their own, and no pool: the end of a process must not wait for a disk that hangs.
    threads = [threading.Thread(target=work, args=[job], name="adapter-filler", daemon=True) for job in jobs[:-1]]
    for thread in threads:
        thread.start()
    for job in jobs[-1:]:
        work(job)
    for thread in threads:
        thread.join()
    for error in errors:
        raise error
