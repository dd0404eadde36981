"""A body has a deadline that moves on with the bytes that arrive, and is never far ahead: an idle body expires."""

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
        self._looked_at, self._counted = 0.0, 0  # at the last look: when, and the bytes by then
        self._left_s = 0.0
        self.bytes = 0  # of the body, so far

    def add(self, count: int) -> None:
        self.bytes += count

    def start(self) -> None:
        """A body is not complete. Does nothing if that is known already."""
        if self._timer is None:
            self._looked_at, self._counted = self._loop.time(), 0
            self._wait(self._body_s)

    def stop(self) -> None:
        self.bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self, left_s: float) -> None:
        """However fast a body came, it has no more than `body_s` from now: else a large one could rest for hours."""
        self._left_s = min(left_s, self._body_s)
        self._timer = self._loop.call_later(self._left_s, self._check)

    def _check(self) -> None:
        now, earned_s = self._loop.time(), (self.bytes - self._counted) / BYTES_PER_S
        left_s = self._left_s + self._looked_at - now + (0.0 if self._is_answered() else earned_s)
        self._looked_at, self._counted = now, self.bytes
        if self._is_held():
            left_s = self._body_s
        if left_s > 0.0:
            self._wait(left_s)
        else:
            self._on_late()
