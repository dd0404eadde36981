"""A bell wakes a rank from another process: a pipe in a folder, which outlives the processes that ring or hear it."""

from __future__ import annotations

import contextlib
import os
import select
from pathlib import Path


class Bells:
    """Every rank's bell. A rank may wait for its own, and ring the others'."""

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        # Open for both directions, a pipe breaks with no reader and ends with no writer.
        flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
        bells = [os.open(folder / f"bell-{number}", flags) for number in range(ranks)]
        self._own = bells.pop(rank)
        self._others = bells
        self._poll = select.poll()
        self._poll.register(self._own, select.POLLIN)

    @staticmethod
    def create(folder: Path, ranks: int) -> None:
        for number in range(ranks):
            os.mkfifo(folder / f"bell-{number}", 0o600)

    def fileno(self) -> int:
        """Readable once the rank's own bell was rung."""
        return self._own

    def ring(self) -> None:
        for bell in self._others:
            with contextlib.suppress(BlockingIOError):  # full of rings already
                os.write(bell, b"!")

    def wait(self, wait_s: float) -> bool:
        """Whether the rank's own bell is rung within this time, or was rung before."""
        return bool(self._poll.poll(wait_s * 1000.0)) and self.hush()

    def hush(self) -> bool:
        """Forget all rings so far; True if there were any."""
        with contextlib.suppress(BlockingIOError):
            return bool(os.read(self._own, 4096))
        return False

    def close(self) -> None:
        for bell in (self._own, *self._others):
            os.close(bell)
