"""A server of letters whose adapters change while it runs, and what clients do with it."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx

from rota.core.ids import Row
from rota.core.messages import AdapterFailed, AdapterFetched, Message
from tests.server.endless import EndlessDevice
from tests.waiting import TIMEOUT_S

CONFIG = json.dumps({"peft_type": "LORA", "r": 8})


@dataclass
class SlowDevice(EndlessDevice):
    """Reads adapters whose path says "slow", or all, only when it is told to; meanwhile it serves."""

    unread: list[Callable[[], None]] = field(default_factory=list)  # of all replicas
    holds: threading.Event = field(default_factory=threading.Event)

    def listen(self, post: Callable[[Message], None]) -> None:
        def post_unless_slow(message: Message) -> None:
            is_slow = isinstance(message, AdapterFetched) and message.adapter_id in self._slow_ids
            if is_slow or (self.holds.is_set() and isinstance(message, AdapterFetched | AdapterFailed)):
                self.unread.append(partial(post, message))
            else:
                post(message)

        super().listen(post_unless_slow)

    @property
    def _slow_ids(self) -> set[int]:
        return {one.adapter_id for plan in self.plans for one in plan.reads if "slow" in one.path}

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Everything is read only when it is told to."""
        self.holds.set()
        try:
            yield
        finally:
            self.holds.clear()
            self.read()

    def read(self) -> None:
        """What was to be read slowly is read."""
        while self.unread:
            self.unread.pop()()


@dataclass
class LenientDevice(EndlessDevice):
    """Lets a row read KV of another version than its own: its client has asked for that."""

    def _read(self, row: Row, start: int, end: int) -> list[int]:
        return [self._kv[self._slot(row, position)][1] for position in range(max(0, start), end)]


def weights(metadata: dict[str, str] | None = None, size: int = 64) -> bytes:
    """A small body of safetensors."""
    tensor = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    header = json.dumps({"__metadata__": metadata or {}, "factor": tensor}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(size)


def put(client: httpx.Client, name: str, path: str | None = "/adapters/new", **fields: Any) -> httpx.Response:
    body = {**({} if path is None else {"path": path}), **fields}
    return client.put(f"/v1/adapters/{name}", json=body)


def send(client: httpx.Client, name: str, body: bytes, **query: str) -> httpx.Response:
    headers = {"content-type": "application/octet-stream"}
    return client.put(f"/v1/adapters/{name}", content=body, params=query, headers=headers)


class Paused:
    """A PUT of weights of which half has come; the server waits for the rest."""

    def __init__(self, url: str, key: str, name: str, body: bytes, config: str = CONFIG) -> None:
        address = urlsplit(url)
        assert address.hostname
        self._connection = HTTPConnection(address.hostname, address.port, timeout=TIMEOUT_S)
        self._connection.putrequest("PUT", f"/v1/adapters/{name}?{urlencode({'config': config})}")
        headers = {"x-api-key": key, "content-type": "application/octet-stream", "content-length": str(len(body))}
        for header, value in (headers | {"expect": "100-continue"}).items():
            self._connection.putheader(header, value)
        self._connection.endheaders()
        self._rest = body
        # The server asks for the body once it would take it; else this is the refusal.
        self.began = b" 100" in self._connection.sock.recv(12, socket.MSG_PEEK)
        if self.began:
            while not self._connection.sock.recv(1 << 12).endswith(b"\r\n\r\n"):
                pass
            half, self._rest = body[: len(body) // 2], body[len(body) // 2 :]
            self._connection.send(half)

    def finish(self) -> tuple[int, str]:
        """Send the rest; gives the answer's status and text."""
        if self.began:
            self._connection.send(self._rest)
        with closing(self._connection) as connection, connection.getresponse() as answer:
            return answer.status, answer.read().decode()

    def close(self) -> None:
        self._connection.close()


def ask(client: httpx.Client, model: str, **fields: Any) -> httpx.Response:
    return client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3, "model": model, **fields})


def versions(client: httpx.Client, name: str) -> dict[int, str]:
    """The versions that are there, by number: the state of each."""
    listed = client.get(f"/v1/adapters/{name}").json()["versions"]
    return {one["version"]: one["state"] for one in listed}
