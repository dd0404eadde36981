"""How processes begin: deaf to the signals of a terminal, and with a heap that is frozen before they serve."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess

# ── children ────────────────────────────────────────────────────────────────────────────────────────────────────────
# Child processes start deaf to the signals of a terminal: only their parent decides what these mean.

# Ctrl-C and the end of a terminal reach the whole group.
_OF_THE_TERMINAL = {signal.SIGINT, signal.SIGHUP}


@contextmanager
def deaf_children() -> Iterator[None]:
    """Processes that are started inside the block inherit a mask of signals."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_TERMINAL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_child(process: BaseProcess) -> None:
    # Else the tracker would start with the first process, and it unblocks SIGINT in any case.
    resource_tracker.ensure_running()
    with deaf_children():
        process.start()


# ── heap ────────────────────────────────────────────────────────────────────────────────────────────────────────────
# A process freezes its heap before it serves: objects that exist then live as long as the process.


def freeze_heap() -> None:
    """Let the garbage collector skip all objects that exist now.

    Libraries and weights make hundreds of thousands of objects. A collection during a step or a stream would visit all
    of them, delay every request for tens of milliseconds, and free nothing.
    """
    gc.collect()
    gc.freeze()
