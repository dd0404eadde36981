"""The least that any server in Python can do: on every tick the same few bytes to everybody, made once.

Measured by the same client, it tells what of a token's age is the machine's and the client's.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
import time
from typing import cast

import uvloop

from front.serving import model_folder
from front.ticks import CYCLE, tick_tokens
from rota.runtime.children import freeze_heap
from rota.text.tokenizer import Tokenizer

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


class _Stream(asyncio.Protocol):
    """One connection: an answer of so many ticks to every request, one after the other."""

    def __init__(self, streams: set[_Stream]) -> None:
        self._streams = streams
        self._received = b""
        self.left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        length = LENGTH.search(head)
        if found and length and len(body) >= int(length[1]):
            self._received = b""
            self.left = json.loads(body)["max_tokens"]
            self.transport.write(HEAD)
            self._streams.add(self)

    def connection_lost(self, _: Exception | None) -> None:
        self._streams.discard(self)

    def tick(self, chunk: bytes) -> None:
        self.left -= 1
        self.transport.write(chunk if self.left else chunk + END)
        if not self.left:
            self._streams.discard(self)


async def _serve(step_s: float) -> None:
    tokenizer = Tokenizer(model_folder())
    words = [tokenizer.decode((token,)) for token in tick_tokens(tokenizer)]
    streams: set[_Stream] = set()
    freeze_heap()
    server = await asyncio.get_running_loop().create_server(lambda: _Stream(streams), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    print(f"url http://{host}:{port}", flush=True)
    tick = int(time.monotonic() / step_s)
    while True:
        tick = max(tick, int(time.monotonic() / step_s)) + 1
        while (wait_s := tick * step_s - time.monotonic()) > 0.0:
            await asyncio.sleep(wait_s)
        chunk = _chunk(words[tick % CYCLE])
        for stream in list(streams):
            stream.tick(chunk)


def _chunk(word: str) -> bytes:
    """An event as long as ours."""
    event = {
        "id": f"cmpl-{'0' * 32}",
        "object": "text_completion",
        "created": 1,
        "model": "bare",
        "choices": [{"index": 0, "text": word, "logprobs": None, "finish_reason": None}],
    }
    data = f"data: {json.dumps(event, separators=(',', ':'))}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


def serve(step_s: float) -> None:
    """Serve until told to stop; prints the address."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    uvloop.run(_serve(step_s))
