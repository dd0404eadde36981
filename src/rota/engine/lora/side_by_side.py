"""Side by side, a few jobs take less time than one after the other, where they wait for memory and disks."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise

from rota.machine import usable_processors

# More threads than this read no faster: memory is the limit.
MOST_THREADS = 8

Job = Callable[[], None]


def threads_for_reads() -> int:
    """Half of the processors that this process may use: the others launch steps and serve clients."""
    return max(1, min(MOST_THREADS, usable_processors() // 2))


def cut_evenly(count: int, parts: int) -> list[range]:
    """The numbers below `count` in so many ranges, or in fewer if there are not so many."""
    parts = max(1, min(count, parts))
    bounds = [count * part // parts for part in range(parts + 1)]
    return [range(first, last) for first, last in pairwise(bounds)]


def side_by_side(jobs: Sequence[Job]) -> None:
    """Returns when all jobs are done, and raises the first error of one. The last job runs in this thread."""
    errors: list[Exception] = []
    ended = threading.Semaphore(0)

    def work(job: Job) -> None:
        try:
            job()
        except Exception as error:  # the border of a thread: the caller raises it
            errors.append(error)
        ended.release()

    # No pool: the end of a process must not wait for a disk that hangs. And no Thread: it is waited for until it runs,
    # a quarter of a millisecond each beside a thread that launches steps.
    for job in jobs[:-1]:
        _thread.start_new_thread(work, (job,))
    for job in jobs[-1:]:
        work(job)
    for _ in jobs:
        ended.acquire()
    for error in errors:
        raise error
