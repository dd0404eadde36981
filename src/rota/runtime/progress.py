"""Progress of a start reaches the supervisor: the code that builds a device tells, and the engine's process listens."""

from __future__ import annotations

from collections.abc import Callable

TellProgress = Callable[[str], None]

_listeners: list[TellProgress] = []


def listen_for_progress(listener: TellProgress) -> None:
    """A process builds one device, so there is one listener for the whole process."""
    _listeners[:] = [listener]


def tell_progress(what: str) -> None:
    """The start goes on; from any thread. Without a listener nothing happens."""
    for listener in _listeners:
        listener(what)
