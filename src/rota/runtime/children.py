"""Child processes start deaf to the signals of a terminal: only their parent decides what these mean."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess

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
