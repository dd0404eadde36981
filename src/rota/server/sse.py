"""An event stream sends server-sent events for as long as its packets come."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping

from fastapi import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
# Empty lines carry nothing, and show proxies that the server is alive. A comment would do the same, but
# `sglang.bench_serving` reads every line that is not empty as JSON.
WAITING = b"\n\n"


def sse_event(content: bytes) -> bytes:
    """An event of JSON that is already encoded."""
    return b"data: " + content + b"\n\n"


def named_event(name: str, content: bytes) -> bytes:
    """An event of JSON with a name, by which its client knows what it is."""
    return b"event: " + name.encode() + b"\ndata: " + content + b"\n\n"


class EventStream(Response):
    """Sends every packet at once, and always calls `on_end` at the end.

    It does not listen for a disconnect: the source of the packets does, and stops. A client that reads slowly delays
    `send`, and so the next packet. Tokens that come meanwhile go into that packet.
    """

    def __init__(
        self,
        packets: AsyncIterator[bytes],
        on_end: Callable[[], None],
        headers: Mapping[str, str] | None = None,
        media_type: str = "text/event-stream",
    ) -> None:
        self.media_type = media_type
        self.status_code = 200
        self.background = None
        self._packets = packets
        self._on_end = on_end
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for packet in self._packets:
                await send({"type": "http.response.body", "body": packet, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._on_end()
