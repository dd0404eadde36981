"""A server whose model says the alphabet, a letter a token, and clients of it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from fastapi import FastAPI

from rota.core.config import ServerConfig
from rota.core.lora_paths import LoraPath
from rota.observe.journey import OnEnd
from rota.runtime.client import EngineClient
from rota.runtime.registry import Registry
from rota.server.access.access import Access
from rota.server.access.keys import KeyRing
from rota.text.tokenizer import Tokenizer
from tests.builders import capacity
from tests.fakes import FakeDevice, alphabet
from tests.server.applications import made_app, running
from tests.server.engines import engines
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import TIMEOUT_S, until

CONTEXT = 200


def speaks(tokens: Sequence[int]) -> int:
    """The alphabet; but after "end" the end of the sequence, and after "é" always another, a byte a token."""
    text = bytes(token for token in tokens if token > 2)
    if text.endswith(b"end"):
        return 2
    if text.endswith("é".encode()) or text.endswith("é".encode() + b"\xc3"):
        return b"\xc3\xa9"[text.endswith(b"\xc3")]
    return alphabet(tokens)


class Gate(threading.Event):
    """A model that says the alphabet, and of so many tokens of prompt and answer waits until it is set."""

    def __init__(self, at: int = 6) -> None:
        super().__init__()
        self._at = at

    def __call__(self, tokens: Sequence[int]) -> int:
        assert len(tokens) < self._at or self.wait(TIMEOUT_S)
        return alphabet(tokens)


def letters_device(**fields: Any) -> FakeDevice:
    return FakeDevice(next_token=speaks, capacity=capacity(max_sequence_tokens=CONTEXT), **fields)


@contextmanager
def serving(
    folder: Path,
    device: FakeDevice | None = None,
    config: ServerConfig | None = None,
    keys: KeyRing | None = None,
    adapters: tuple[str, ...] = (),
    load_refusal: str = "",
    now: Callable[[], float] = lambda: 0.0,
    on_finish: Sequence[OnEnd] = (),
    has_grammars: bool = False,
    around: Callable[[FastAPI], Any] = lambda app: app,
) -> Iterator[httpx.Client]:
    """A client of a server named "letters". `now` is the clock of the keys' limits: it stands still."""
    registry = Registry("letters", "/models/letters")
    loaded = [registry.add(LoraPath(name=name, path=f"/adapters/{name}")) for name in adapters]
    service = EngineClient(engines(lambda: device or letters_device()), loaded)
    tokenizer = Tokenizer(write_byte_tokenizer(folder))
    access = Access(registry, keys, load_refusal, now, allowed_origins=config.allowed_origins if config else ())
    app = made_app(
        service, tokenizer, registry, access=access, config=config, on_finish=on_finish, has_grammars=has_grammars
    )
    # Without TLS nobody needs certificates, and to read them all takes longer than all else that a client does here.
    with running(around(app)) as url, httpx.Client(base_url=url, verify=False) as client:
        service.wait_until_ready()
        yield client


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, which must end as OpenAI's do."""
    return events_in(response.text.split("\n\n"))


def events_in(lines: Iterable[str]) -> list[dict[str, Any]]:
    *events, done = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    return error


def raw_ask(
    client: httpx.Client, path: str = "/v1/completions", receive_buffer: int | None = None, **fields: Any
) -> socket.socket:
    """A connection that has asked for something and reads nothing of it yet."""
    address, body = urlsplit(str(client.base_url)), json.dumps(fields)
    connection = socket.socket()
    connection.settimeout(TIMEOUT_S)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect((address.hostname, address.port))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall((head + body).encode())
    return connection


def counts(client: httpx.Client) -> dict[str, int]:
    """The scheduler's requests, by what becomes of them now."""
    states = client.get("/server_info").json()["internal_states"]
    return {kind: sum(state[f"num_{kind}_reqs"] for state in states) for kind in ("running", "waiting", "parked")}


def has_ended(client: httpx.Client) -> bool:
    """Whether the scheduler has no request any more."""
    return until(lambda: not any(counts(client).values()))


def steps_made(client: httpx.Client, device: FakeDevice) -> int:
    """Waits until no step will be made any more; gives how many were made."""
    assert has_ended(client), "the scheduler still has requests"
    return len(device.plans)
