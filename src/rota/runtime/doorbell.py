"""A doorbell wakes a loop that waits on file descriptors, from any thread, and hands it messages."""

from __future__ import annotations

import contextlib
import socket
from collections import deque

from rota.core.messages import Message


class Doorbell:
    """`fileno` is readable while there are messages."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)

    def fileno(self) -> int:
        return self._receiver.fileno()

    def post(self, message: Message) -> None:
        """Leave a message and ring."""
        self._messages.append(message)
        with contextlib.suppress(BlockingIOError):  # full of rings already, so the loop will wake
            self._sender.send(b"!")

    def take(self) -> list[Message]:
        """All messages; does not wait."""
        # The rings are read first: a message posted after that rings again.
        with contextlib.suppress(BlockingIOError):
            while self._receiver.recv(4096):
                pass
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()
