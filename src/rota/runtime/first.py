"""What the adapters to start with need reaches an engine while it is built, before it chooses its slots.

The server looks at thousands of folders while the engine's process imports, so that no start waits for that look.
"""

from __future__ import annotations

from collections.abc import Callable

from rota.core.config import FirstAdapters

WaitForFirst = Callable[[], FirstAdapters]

_waiters: list[WaitForFirst] = []


def listen_for_first(wait: WaitForFirst) -> None:
    """A process builds one device, so there is one way to wait for the whole process."""
    _waiters[:] = [wait]


def wait_for_first() -> FirstAdapters:
    """Blocks until the server has told. Without a server that tells there are none: a follower asks rank 0."""
    return _waiters[0]() if _waiters else FirstAdapters()
