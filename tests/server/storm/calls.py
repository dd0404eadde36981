"""Calls to an application without a socket: each is a task, and its client may leave at any moment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import urlencode

from fastapi import FastAPI

# An answer needs fewer turns of the event loop than this between two passes of the engine.
TURNS = 60


class Inline(ThreadPoolExecutor):
    """Runs what is meant for a thread at once, so that the order of things is the same every time."""

    def submit(self, work: Any, /, *args: Any, **fields: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args, **fields))
        except BaseException as error:  # whoever asks for the result gets it
            future.set_exception(error)
        return future


class Call:
    """One call: what its client sent, and what it has got."""

    def __init__(self, app: FastAPI, loop: asyncio.AbstractEventLoop, method: str, path: str, **sent: Any) -> None:
        self._body, self._is_cut = sent.get("body", b""), sent.get("is_cut", False)
        self._has_left, self._is_read = asyncio.Event(), False
        self.status, self.headers, self._chunks = 0, dict[str, str](), list[bytes]()
        query, kind = urlencode(sent.get("query", {})), sent.get("kind", "application/json")
        self.task = loop.create_task(app(_scope(method, path, query, kind), self._receive, self._send))

    @property
    def is_done(self) -> bool:
        return self.task.done()

    @property
    def has_left(self) -> bool:
        return self._has_left.is_set()

    @property
    def text(self) -> str:
        return b"".join(self._chunks).decode()

    def json(self) -> Any:
        return json.loads(self.text)

    def leave(self) -> None:
        """The client closes its connection."""
        self._has_left.set()

    async def _receive(self) -> dict[str, Any]:
        if not self._is_read:
            self._is_read = True
            half = len(self._body) // 2
            return {
                "type": "http.request",
                "body": self._body[: half if self._is_cut else None],
                "more_body": self._is_cut,
            }
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        elif not self.has_left:
            self._chunks.append(message.get("body", b""))


def _scope(method: str, path: str, query: str, kind: str) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", kind.encode())],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }


async def turns() -> None:
    """Let every task go as far as it can without the engine."""
    for _ in range(TURNS):
        await asyncio.sleep(0)
