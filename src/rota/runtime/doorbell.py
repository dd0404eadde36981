"""A doorbell wakes a loop that waits on file descriptors, from any thread, and hands it what was brought."""

from __future__ import annotations

import contextlib
import socket
from collections import deque

from rota.core.messages import Message


class Doorbell:
    """`fileno` is readable while messages are there."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._ear, self._button = socket.socketpair()
        self._ear.setblocking(False)
        self._button.setblocking(False)

    def fileno(self) -> int:
        return self._ear.fileno()

    def post(self, message: Message) -> None:
        """Leave a message and ring."""
        self._messages.append(message)
        with contextlib.suppress(BlockingIOError):  # it has rung so often already that nobody can miss it
            self._button.send(b"!")

    def take(self) -> list[Message]:
        """Everything that was left; does not wait."""
        # Silence first: a message left after that rings again.
        with contextlib.suppress(BlockingIOError):
            while self._ear.recv(4096):
                pass
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def close(self) -> None:
        self._ear.close()
        self._button.close()
