"""SIGHUP asks a server to read its keys again, and ends it only if its terminal is gone."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def hangups(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` on SIGHUP while the block runs.

    By itself SIGHUP would end the process, also where it was meant to read keys. A terminal that closes sends SIGHUP
    too, and then the server ends as on SIGTERM, unless `nohup` has started it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # no other thread may set handlers
        return
    is_tied = _has_terminal() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN

    def heed(_signal: int, _frame: object) -> None:
        if is_tied and not _has_terminal():
            signal.raise_signal(signal.SIGTERM)
        else:
            act()

    before = signal.signal(signal.SIGHUP, heed)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _has_terminal() -> bool:
    """Whether input or output is a terminal. One that was closed is none any more."""
    return any(map(os.isatty, (0, 1, 2)))
