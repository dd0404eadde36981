"""Last words reach the supervisor from any thread, also while the loop's own thread is stuck inside the device."""

from __future__ import annotations

from collections.abc import Callable

EndWith = Callable[[str], None]

_listeners: list[EndWith] = []


def listen_for_last_words(listener: EndWith) -> None:
    """A process has one engine, so there is one listener for the whole process; it tells the reason and ends both."""
    _listeners[:] = [listener]


def end_with(reason: str) -> None:
    """The engine cannot go on; from any thread. Without a listener nothing happens."""
    for listener in _listeners:
        listener(reason)
