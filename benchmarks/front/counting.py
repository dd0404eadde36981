"""Clients that only count: streams as cheap as they can be in Python, so that the machine is left to the server."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from typing import Any, cast
from urllib.parse import urlsplit

import uvloop

from rota.bench.questions import random_text

EVENT, END = b"data:", b"0\r\n\r\n"


class _Stream(asyncio.Protocol):
    """One connection: a request, and the next one when its answer has ended."""

    def __init__(self, bodies: list[bytes], host: str, counts: dict[str, int]) -> None:
        self._bodies, self._host, self._counts = bodies, host, counts
        self._sent = 0
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def data_received(self, data: bytes) -> None:
        seen = self._tail + data
        # Part of a word that was cut may come again with the next bytes; a whole one never does.
        self._counts["events"] += seen.count(EVENT)
        self._tail = seen[-4:]
        if seen.endswith(END):
            self._tail = b""
            self._counts["events"] -= 1  # [DONE]
            self._counts["answers"] += 1
            self._ask()

    def _ask(self) -> None:
        body = self._bodies[self._sent % len(self._bodies)]
        self._sent += 1
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        self._transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)


async def _follow(asked: dict[str, Any]) -> None:
    address = urlsplit(asked["url"])
    counts = {"events": 0, "answers": 0}
    loop = asyncio.get_running_loop()
    for number in range(asked["streams"]):
        bodies = [_body(asked, number, first) for first in (True, *(False,) * 8)]
        await loop.create_connection(
            lambda bodies=bodies: _Stream(bodies, address.netloc, counts), address.hostname, address.port
        )
    while True:  # until this process is told to stop
        print(json.dumps({"at": time.monotonic(), **counts}), flush=True)
        await asyncio.sleep(0.1)


def _body(asked: dict[str, Any], number: int, is_first: bool) -> bytes:
    """First answers are of all lengths, so that streams do not end and begin all at once for ever after."""
    tokens = asked["tokens"]
    length = max(1, tokens * (number + 1) // asked["streams"]) if is_first else tokens
    prompt = random_text(random.Random(f"{number} {is_first} {asked['seed']}"), asked["prompt_tokens"])
    fields = {"prompt": prompt, "max_tokens": length, "temperature": 0.0, "stream": True, "ignore_eos": True}
    return json.dumps(fields).encode()


if __name__ == "__main__":
    uvloop.run(_follow(json.loads(sys.argv[1])))
