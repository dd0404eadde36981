"""Server-sent events are read as the bytes come: the text after `data:` in every complete line."""

from __future__ import annotations

DONE = b"[DONE]"


class EventReader:
    """Bytes in, payloads out. Comments are dropped: servers send them to keep a quiet connection alive."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
