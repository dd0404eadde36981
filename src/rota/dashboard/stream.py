"""A stream sends four frames a second to one reader; a slow reader gets fewer, and always the newest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import msgspec

from rota.core.errors import RequestError
from rota.core.messages import Inspect
from rota.dashboard.feed import Feed, Seen
from rota.dashboard.window import SPANS_S
from rota.runtime.service import Phase

FRAME_S = 0.25


class Viewers:
    """The open pages. While there are any, the engine is asked for its state, once for all of them."""

    def __init__(self, feed: Feed, ask: Callable[[Inspect], None]) -> None:
        """`ask` sends a query to the engine. It may raise RequestError while the engine is down."""
        self._feed = feed
        self._ask = ask
        self._asked_at = float("-inf")
        self.count = 0

    async def frames(
        self, may_load: bool, is_admitted: Callable[[], bool] = lambda: True, window_s: int = SPANS_S[0]
    ) -> AsyncIterator[bytes]:
        """Server-sent events until the server stops, or the viewer is admitted no longer.

        A frame is made when the last one has left, so none waits.
        """
        self.count += 1
        try:
            seen = Seen()
            while is_admitted():
                self._inspect()
                now = time.monotonic()
                self._feed.advance(now)
                frame, seen = self._feed.frame(now, seen, may_load, window_s)
                yield b"data: " + msgspec.json.encode(frame) + b"\n\n"
                if frame.phase == Phase.STOPPED:
                    return
                await asyncio.sleep(FRAME_S)
        finally:
            self.count -= 1

    def _inspect(self) -> None:
        """The engine's answer goes to the feed, and the next frame shows it."""
        now = time.monotonic()
        if now - self._asked_at < 0.9 * FRAME_S:
            return  # another viewer has just asked
        self._asked_at = now
        with suppress(RequestError):  # the engine is down, and the frame says so
            self._ask(Inspect(now))
