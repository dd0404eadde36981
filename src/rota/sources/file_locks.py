"""Locks of files keep threads and processes apart, and end with the process that holds them."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

PAUSE_S = 0.01


@contextmanager
def alone(lock: Path, patience_s: float) -> Iterator[bool]:
    """Hold a lock that others wait for; False if it did not become free in time. Its file is gone afterwards."""
    ends_at = time.monotonic() + patience_s
    while (file := _taken(lock)) is None:
        if time.monotonic() > ends_at:
            yield False
            return
        time.sleep(PAUSE_S)
    with file:
        try:
            yield True
        finally:
            lock.unlink(missing_ok=True)  # while it is held: who waits for this file finds that it is gone


@contextmanager
def held(path: Path, kind: int) -> Iterator[bool]:
    """Hold a file's lock without waiting; False if the file is not there, or held in another way."""
    try:
        file = path.open("r+")
    except FileNotFoundError:
        yield False
        return
    with file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield path.exists()  # else it was removed between the two


def _taken(lock: Path) -> TextIO | None:
    file = lock.open("w")
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file.fileno()), lock.stat()):  # else another has held and removed it
            return file
    file.close()
    return None
