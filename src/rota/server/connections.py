"""A connection may say so much and take so long until its request's head is complete, and must read its answers."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# Every line and header together; the parser itself would keep them without end.
MAX_HEAD_BYTES = 64 * 1024
# From the first moment of a connection, or the first byte after an answer.
HEAD_S = 30.0
# A client that takes not one byte for so long, with answers waiting for it, will not take any more.
READ_S = 120.0


class BoundedConnection(HttpToolsProtocol):
    """Uvicorn's, which closes idle connections after an answer, and would wait for ever for a first request's head."""

    head_s = HEAD_S
    read_s = READ_S

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._head_bytes = 0
        self._is_in_head = True
        self._deadline: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        self._stop_watching()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_in_head = self._is_in_head
        if was_in_head:
            self._head_bytes += len(data)  # before it is read: if the head ends in it, the rest is a body
        super().data_received(data)
        if not (was_in_head and self._is_in_head) or self.transport.is_closing():
            return
        if self._deadline is None:
            self._start_clock()
        if self._head_bytes > MAX_HEAD_BYTES:
            self.send_400_response(f"The request's headers are larger than {MAX_HEAD_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._head_bytes = 0
        self._stop_clock()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_head = True
        super().on_message_complete()

    def pause_writing(self) -> None:
        """More waits to be read than is kept for a client; whoever writes waits from here on."""
        super().pause_writing()
        self._watch_reading()

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

    def _watch_reading(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._reading = self.loop.call_later(self.read_s, self._look_at_reading, unread)

    def _look_at_reading(self, unread: int) -> None:
        if self.transport.get_write_buffer_size() < unread:
            self._watch_reading()
        else:
            self.transport.abort()

    def _stop_watching(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _start_clock(self) -> None:
        self._deadline = self.loop.call_later(self.head_s, self._run_out)

    def _run_out(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:
            # An answer is under way, and its client has sent a little more than its request: an empty line, say.
            self._start_clock()

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
