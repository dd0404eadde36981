"""Marks say which ranks are in an all-gather; the kernel's locks decide where two processes could differ.

A rank writes its line of a round with its gate closed. Whoever leaves a rank out of a round marks that with the same
gate closed, and only if the line is not there. So a rank is in a round or is marked as out, for all to see, whoever
dies meanwhile: the kernel opens the gates of the dead. A process holds its life lock until it ends, so a life lock that
is free says for sure that its process is dead.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rota.core.errors import RotaError

# The numbers of a rank: the round with which it came in, the round from which it is out (it is in while `SINCE` is the
# larger), 1 while it wants to come in, and the last round that it began.
SINCE, OUT, WISH, SAID = range(4)
_MARKS = 4
# A predecessor that was killed is gone within this time, or something else is wrong.
TAKE_OVER_S = 5.0
# A gate is closed for microseconds. A process that was stopped meanwhile must not stop the others.
GATE_S = 0.1
_RETRY_S = 0.001


class Marks:
    """Every rank's numbers, gate and life lock. Rounds are counted from 1."""

    def __init__(self, folder: Path, rank: int) -> None:
        with (folder / "marks").open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        # Assigning an item of this view is one store of eight bytes.
        self._numbers = memoryview(self._memory).cast("Q")
        self.ranks = len(self._numbers) // _MARKS
        self._rank = rank
        self._gates = [_open(folder / f"gate-{number}") for number in range(self.ranks)]
        self._lives = [_open(folder / f"life-{number}") for number in range(self.ranks)]
        self._door = _open(folder / "door")
        if not _lock(self._lives[rank], TAKE_OVER_S):
            raise RotaError(f"Replica {rank} cannot share reports: another process still is replica {rank}.")

    @staticmethod
    def create(folder: Path, ranks: int) -> None:
        """The files of a round in which nobody is."""
        (folder / "marks").write_bytes(bytes(8 * _MARKS * ranks))
        for number in range(ranks):
            (folder / f"gate-{number}").touch()
            (folder / f"life-{number}").touch()
        (folder / "door").touch()

    def get(self, mark: int, rank: int) -> int:
        return self._numbers[_MARKS * rank + mark]

    def set(self, mark: int, rank: int, number: int) -> None:
        self._numbers[_MARKS * rank + mark] = number

    def latest(self) -> int:
        """No round with a larger number was ever begun."""
        return max(self._numbers)

    def is_in(self, rank: int) -> bool:
        return self.get(SINCE, rank) > self.get(OUT, rank)

    def is_dead(self, rank: int) -> bool:
        if rank == self._rank or not _lock(self._lives[rank], kind=fcntl.LOCK_SH):
            return False
        fcntl.flock(self._lives[rank], fcntl.LOCK_UN)
        return True

    @contextmanager
    def gate(self, rank: int) -> Iterator[bool]:
        """Closes a rank's gate; False if another process holds the gate for too long."""
        yield from _holding(self._gates[rank])

    @contextmanager
    def door(self) -> Iterator[bool]:
        """One process at a time may come in."""
        yield from _holding(self._door)

    def close(self) -> None:
        self._numbers.release()
        self._memory.close()
        for file in (*self._gates, *self._lives, self._door):
            os.close(file)


def _open(path: Path) -> int:
    """Not inherited by programs that this process starts, so that none of them keeps a lock."""
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def _holding(file: int) -> Iterator[bool]:
    is_held = _lock(file, GATE_S)
    try:
        yield is_held
    finally:
        if is_held:
            fcntl.flock(file, fcntl.LOCK_UN)


def _lock(file: int, within_s: float = 0.0, kind: int = fcntl.LOCK_EX) -> bool:
    ends_at = 0.0
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            now = time.monotonic()
            ends_at = ends_at or now + within_s
            if now >= ends_at:
                return False
            time.sleep(_RETRY_S)
        else:
            return True
