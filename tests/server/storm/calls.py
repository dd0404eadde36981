"""Calls to an application without a socket: each is a task, and its client may leave at any moment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import urlencode

from fastapi import FastAPI

from rota.core.events import Event, Moved, Preempted
from rota.server.answers.respond import VERSION_HEADER
from tests.server.storm.library import Library, Part

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


Tokens = tuple[int, ...]
# What may be wrong, and its status.
CODES = {
    "model_not_found": 404,
    "unknown_adapter": 404,
    "adapter_failed": 400,
    "bad_field": 400,
    "queue_full": 429,
    "engine_died": 503,
    "not_a_number": 500,
}


class Ask(NamedTuple):
    """A client's question."""

    call: Call
    prompt: Tokens
    # It asked for one version by its number, and that may be leaving.
    may_miss: bool


class Judge:
    """Knows what lies behind each version, and what the engine has told."""

    def __init__(self, library: Library, events: list[Event]) -> None:
        self._library, self._events = library, events
        self.kinds: dict[tuple[str, int], str] = {}  # by name and version

    def check(self, ask: Ask) -> None:
        call, prompt, answer = ask.call, ask.prompt, answer_of(ask.call)
        if "error" in answer:
            code = answer["error"]["code"]
            assert code in CODES, answer
            assert code != "unknown_adapter" or ask.may_miss, "a name means a version that is not there"
            return
        name, tokens = answer["model"].partition("@")[0], answer["tokens"]
        moves = answer["moves"]
        versions = [int(one) for one in call.headers[VERSION_HEADER].split(", ")]
        first = moves[0]["from"] if moves else versions[0]
        assert versions == ([first] if answer["is_streamed"] or not moves else _named(moves))
        parts = [Part(self.kinds[name, first], 0)]
        for move in moves:
            parts.append(Part(self.kinds[name, move["to"]], move["token"], move["kv"] == "keep"))
        sure = self._sure(answer["id"], parts, tokens)
        assert self._library.answer(parts, prompt, tokens)[:sure] == tokens[:sure], (parts, answer)

    def _sure(self, name: str, parts: list[Part], tokens: list[int]) -> int:
        """How many tokens PEFT can tell: not those behind KV of two versions of which a part was computed again."""
        told = [one for one in self._events if isinstance(one, Moved | Preempted)]
        own = [one for one in told if one.request_id.partition("#")[0] == name]
        last = [place for place, one in enumerate(own) if isinstance(one, Moved) and one.kept_kv]
        again = last and any(isinstance(one, Preempted) for one in own[last[0] :])
        # No token between two moves: what was to be computed again was not yet, and the part of it that was is kept.
        starts = [0, *(part.start for part in parts)]
        half = [before == part.start for before, part in zip(starts, parts, strict=False)]
        unsure = [part.start for part, is_half in zip(parts, half, strict=True) if part.keeps_kv and (again or is_half)]
        return min(unsure, default=len(tokens))


def _named(moves: list[dict[str, Any]]) -> list[int]:
    return list(dict.fromkeys(version for move in moves for version in (move["from"], move["to"])))


def answer_of(call: Call) -> dict[str, Any]:
    """A whole answer or a stream: its tokens, its moves, or its error."""
    is_streamed = call.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in call.text.split("\n\n") if line.startswith("data: {")]
    events: list[dict[str, Any]] = [json.loads(line) for line in lines] if is_streamed else [call.json()]
    if errors := [event for event in events if "error" in event]:
        return errors[0]
    tokens = [token for event in events for choice in event["choices"] for token in choice["token_ids"]]
    moves = events[-1].get("rota", {}).get("moves", [])
    last = events[-1]
    return {"id": last["id"], "model": last["model"], "tokens": tokens, "moves": moves, "is_streamed": is_streamed}
