"""A connection has limits: the size and time of a request's head, and the time in which its client must read."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# All lines and headers together. The parser itself has no limit.
MAX_HEAD_BYTES = 64 * 1024
# Counted from the start of a connection, or from the first byte after an answer.
HEAD_S = 30.0
# A client that reads no byte of a waiting answer for this long will not read on.
READ_S = 120.0


class BoundedConnection(HttpToolsProtocol):
    """Uvicorn's protocol closes idle connections after an answer, but would wait for ever for the first head."""

    head_s = HEAD_S
    read_s = READ_S

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._head_bytes = 0
        self._is_in_head = True
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_read_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_in_head = self._is_in_head
        if was_in_head:
            self._head_bytes += len(data)  # counted before parsing: if the head ends in it, the rest is a body
        super().data_received(data)
        if not (was_in_head and self._is_in_head) or self.transport.is_closing():
            return
        if self._head_timer is None:
            self._start_head_timer()
        if self._head_bytes > MAX_HEAD_BYTES:
            self.send_400_response(f"The request's headers are larger than {MAX_HEAD_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._head_bytes = 0
        self._stop_head_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_head = True
        super().on_message_complete()

    def pause_writing(self) -> None:
        """The client's buffer is full. Writers wait from now on."""
        super().pause_writing()
        self._start_read_timer()

    def resume_writing(self) -> None:
        self._stop_read_timer()
        super().resume_writing()

    def _start_read_timer(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._read_timer = self.loop.call_later(self.read_s, self._check_reading, unread)

    def _check_reading(self, unread: int) -> None:
        if self.transport.get_write_buffer_size() < unread:
            self._start_read_timer()
        else:
            self.transport.abort()

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.head_s, self._on_head_timeout)

    def _on_head_timeout(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:
            # An answer is being sent, and its client sent a little more than its request, for example an empty line.
            self._start_head_timer()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
