"""A body has a deadline that moves on with the bytes that arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

# A client that sends no faster than this for long is not waited for.
BYTES_PER_S = 10_000


class BodyDeadline:
    """`is_answered` says that bytes no longer count for more time, and `is_held` that the server itself does not read.

    Without `is_answered` a client that was refused could go on with its body for ever.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        body_s: float,
        is_answered: Callable[[], bool],
        is_held: Callable[[], bool],
        on_late: Callable[[], None],
    ) -> None:
        self._loop, self._body_s = loop, body_s
        self._is_answered, self._is_held, self._on_late = is_answered, is_held, on_late
        self._timer: asyncio.TimerHandle | None = None
        self._began_at = 0.0
        self.bytes = 0  # of the body, so far

    def add(self, count: int) -> None:
        self.bytes += count

    def start(self) -> None:
        """A body is not complete. Does nothing if that is known already."""
        if self._timer is None:
            self._began_at = self._loop.time()
            self._wait(self._body_s)

    def stop(self) -> None:
        self.bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self, time_s: float) -> None:
        self._timer = self._loop.call_later(time_s, self._check)

    def _check(self) -> None:
        if self._is_held():
            self._began_at = self._loop.time()
        earned_s = 0.0 if self._is_answered() else self.bytes / BYTES_PER_S
        left_s = self._began_at + self._body_s + earned_s - self._loop.time()
        if left_s > 0.0:
            self._wait(left_s)
        else:
            self._on_late()
