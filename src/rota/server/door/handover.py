"""A large body is handed over: a thread reads it from its socket into a file, and the event loop serves on.

Through the event loop such a body goes in thousands of pieces. Each is copied four times under the interpreter's lock,
and the tokens of other clients wait for it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any, BinaryIO

from starlette.requests import ClientDisconnect

# The name of the extension in a request's scope. Its "take" gives the handover, or None where the event loop must read.
EXTENSION = "rota.handover"
# Read at a time. More would not stay in a core's cache until it is written; less would ask for the interpreter's lock
# more often, and wait for it while the event loop works.
PIECE_BYTES = 1 << 20
# With less to come, a thread is not worth its start.
LEAST_BYTES = 512 << 10
# A thread looks again after this time. Deadlines are the event loop's.
_LOOK_S = 60.0


class Handover:
    """The rest of one body. The event loop has its connection back when the rest was read, or cannot be."""

    def __init__(
        self, handle: int, left: int, on_bytes: Callable[[int], None], on_end: Callable[[Handover], None]
    ) -> None:
        """`left` bytes are still to come. `on_bytes` is called by the thread, `on_end` by the event loop."""
        self.left = left
        self._on_bytes, self._on_end = on_bytes, on_end
        self._socket = socket.socket(fileno=os.dup(handle))
        self._socket.settimeout(_LOOK_S)  # a socket without one would wait for ever, and so would the event loop's
        self._closing = threading.Lock()

    async def write_to(self, file: BinaryIO, first: bytes | bytearray, threads: Executor) -> int:
        """Write what was read before, then the rest; gives the bytes of the rest.

        Raises ClientDisconnect if the client leaves, and the file's OSError once all was read: many clients read no
        answer before they have sent everything.
        """
        rest = self.left
        try:
            await asyncio.get_running_loop().run_in_executor(threads, self._copy, file, first)
        finally:
            self.stop()
            self._on_end(self)
        return rest

    def stop(self) -> None:
        """Let the thread end, if it still reads."""
        with self._closing, suppress(OSError):
            if self.left:
                self._socket.shutdown(socket.SHUT_RDWR)

    def _copy(self, file: BinaryIO, first: bytes | bytearray) -> None:
        try:
            failure = _written(file, first)
            buffer = memoryview(bytearray(min(PIECE_BYTES, self.left)))
            while self.left:
                piece = self._read(buffer)
                failure = failure or _written(file, piece)
        finally:
            with self._closing:
                self._socket.close()
        if failure:
            raise failure

    def _read(self, buffer: memoryview) -> memoryview:
        """As much as the buffer holds, but for the last piece."""
        wanted, have = min(len(buffer), self.left), 0
        while have < wanted:
            got = self._receive(buffer[have:wanted])
            have += got
            self.left -= got
            self._on_bytes(got)
        return buffer[:have]

    def _receive(self, buffer: memoryview) -> int:
        while True:
            try:
                got = self._socket.recv_into(buffer)
            except TimeoutError:
                continue
            except OSError:
                got = 0
            if not got:
                raise ClientDisconnect
            return got


def handover_of(scope: Mapping[str, Any]) -> Handover | None:
    """The rest of a request's body, if it is large and its connection can give it up.

    To be asked for after the first bytes were received: with these the size is held against its limit.
    """
    extension = scope.get("extensions", {}).get(EXTENSION)
    return extension["take"]() if extension else None


def _written(file: BinaryIO, content: bytes | bytearray | memoryview) -> OSError | None:
    try:
        file.write(content)
    except OSError as error:
        return error
    return None
