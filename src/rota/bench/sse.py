"""Reads server-sent events as the bytes come: what follows `data:` in every line that is complete."""

from __future__ import annotations

DONE = b"[DONE]"


class EventReader:
    """Bytes in, payloads out; comments, with which servers keep a quiet connection alive, are dropped."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
