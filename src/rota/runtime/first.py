"""What the adapters to start with need reaches an engine while it is built, before it chooses its slots.

The server looks at thousands of folders while the engine's process imports, so that no start waits for that look.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from rota.core.config import FirstAdapters


class Look:
    """A look at the adapters to start with, which blocks: made once, in a thread, when it is first asked for."""

    def __init__(self, look: Callable[[], FirstAdapters]) -> None:
        self._look = look
        self._lock = threading.Lock()
        self._found: Future[FirstAdapters] | None = None

    def begin(self) -> Future[FirstAdapters]:
        """For any thread; the same for all. Called once the engine's process runs: its imports take longer."""
        with self._lock:
            if self._found is None:
                pool = ThreadPoolExecutor(1, "rota-first")
                self._found = pool.submit(self._look)
                pool.shutdown(wait=False)
            return self._found


WaitForFirst = Callable[[], FirstAdapters]

_waiters: list[WaitForFirst] = []


def listen_for_first(wait: WaitForFirst) -> None:
    """A process builds one device, so there is one way to wait for the whole process."""
    _waiters[:] = [wait]


def wait_for_first() -> FirstAdapters:
    """Blocks until the server has told. Without a server that tells there are none: a follower asks rank 0."""
    return _waiters[0]() if _waiters else FirstAdapters()
