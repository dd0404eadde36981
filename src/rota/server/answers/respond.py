"""Every route that generates answers here, whole or streamed, in any shape."""

from __future__ import annotations

import asyncio
import re
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec
from fastapi import Request as HttpRequest
from fastapi import Response
from pydantic import BaseModel, Field
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from rota.core.errors import Fault, RequestError
from rota.core.events import Moved
from rota.core.request import Request
from rota.runtime.registry import Registry
from rota.server.answers.answer import Answer
from rota.server.call import HEADER
from rota.server.calls.call import Call
from rota.server.calls.reading_room import Work
from rota.server.context import AppContext
from rota.server.errors import error_body, note
from rota.server.open_answers import CallIdentity
from rota.server.streams import Delta

# ── own headers ─────────────────────────────────────────────────────────────────────────────────────────────────────
# An answer of an adapter says which version gave it: in a header, and where it went on under another one. A header
# also names the fields that were ignored.

VERSION_HEADER = "x-rota-adapter-version"
IGNORED_HEADER = "x-rota-ignored-fields"
_MOST_NAMES, _MOST_OF_A_NAME = 32, 64


def version_header(registry: Registry, requests: Iterable[Request]) -> dict[str, str]:
    """The number alone, or `name@version` of each adapter if a call asks several. Nothing for the base model."""
    ids = dict.fromkeys(request.adapter_id for request in requests)
    found = [adapter for adapter_id in ids if (adapter := registry.by_id(adapter_id))]
    if not found:
        return {}
    return {VERSION_HEADER: str(found[0].version) if len(ids) == 1 else ", ".join(one.label for one in found)}


def ignored_header(call: Call) -> dict[str, str]:
    """The fields that changed nothing, so that nobody takes them for heard. Their names are the client's own words."""
    names = [re.sub(r"[^\w.-]", "?", name[:_MOST_OF_A_NAME], flags=re.ASCII) for name in call.ignored[:_MOST_NAMES]]
    return {IGNORED_HEADER: ", ".join(names)} if names else {}


def moved_header(moves: Iterable[tuple[int, Moved]]) -> dict[str, str]:
    """All versions of an answer that was moved and is sent as a whole, in their order."""
    versions = dict.fromkeys(version for _, move in moves for version in (move.old_version, move.new_version))
    return {VERSION_HEADER: ", ".join(map(str, versions))} if versions else {}


def moves_field(moves: Sequence[tuple[int, Moved]]) -> dict[str, Any]:
    """The field `rota` of an answer that was moved; nothing for all others. Each move has the choice it is of."""
    if not moves:
        return {}
    return {"rota": {"moves": [_shown(choice, move) for choice, move in moves]}}


def _shown(choice: int, move: Moved) -> dict[str, Any]:
    return {
        "choice": choice,
        "from": move.old_version,
        "to": move.new_version,
        "token": move.output_tokens,
        "kv": "keep" if move.kept_kv else "recompute",
    }


# ── rota body ───────────────────────────────────────────────────────────────────────────────────────────────────────
# The field `rota` of answers, for /docs: what Rota tells beside the fields of each API.


class MoveBody(BaseModel):
    """Where an answer went on under another version of its adapter."""

    choice: int
    old: int = Field(alias="from")
    new: int = Field(alias="to")
    token: int  # tokens that the old version gave
    kv: Literal["keep", "recompute"]


class RotaBody(BaseModel):
    """Of an answer that was moved to a new version. All other answers have no such field.

    Which version of an adapter gave an answer, the header `x-rota-adapter-version` says.
    """

    moves: list[MoveBody]


# ── sse ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
# An event stream sends server-sent events for as long as its packets come.

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


# ── writers ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# A writer writes one answer for its client: whole, or as the packets of a stream.


class ResponseWriter(ABC):
    """What `respond` needs of a route. The writer of a route that streams nothing writes whole answers alone."""

    media_type = "text/event-stream"  # of a stream
    is_slow = False  # a whole answer may be large, and is written in a thread

    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    @abstractmethod
    def whole(self, deltas: Sequence[Delta]) -> bytes:
        """The body of an answer that is not streamed, from one delta for each choice."""

    def packet(self, deltas: Sequence[Delta]) -> bytes:
        """The news of one step, or empty bytes for news that are not shown. Without deltas, a sign of life."""
        raise NotImplementedError

    def ending(self) -> bytes:
        """The end of a stream whose answer is complete."""
        raise NotImplementedError

    def failure(self, fault: Fault) -> bytes:
        """The end of a stream whose answer failed."""
        raise NotImplementedError


class DataEvents(ResponseWriter):
    """A stream of events that have data and no name, and end in `[DONE]`."""

    @abstractmethod
    def event(self, delta: Delta) -> bytes:
        """One event as JSON. Empty bytes: nothing to send."""

    def last_event(self) -> bytes:
        """The last event as JSON, if there is one."""
        return b""

    def packet(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join([sse_event(event) for event in map(self.event, deltas) if event]) if deltas else WAITING

    def ending(self) -> bytes:
        return (sse_event(last) if (last := self.last_event()) else b"") + DONE

    def failure(self, fault: Fault) -> bytes:
        return sse_event(msgspec.json.encode(error_body(fault))) + DONE


# ── respond ─────────────────────────────────────────────────────────────────────────────────────────────────────────

CallT = TypeVar("CallT", bound=Call)


async def respond(
    context: AppContext,
    http: HttpRequest,
    work: Work[CallT],
    make_writer: Callable[[Answer, CallT], ResponseWriter],
    prefix: str = "",
) -> Response:
    """Answer a call whose body `work` reads. `prefix`: what the answer's id has before the call's name.

    An error before the first byte has its own status, also for a stream. A stream's headers leave with its first
    token, or after `keep_alive_s` without a token. From then on, empty lines keep it alive, and an error is its last
    event. When the client leaves, its requests end.
    """
    caller = context.identify(http)
    call = await context.read(caller.key, http, work)
    caller = context.named(http, caller, call)
    if call.fault:
        raise RequestError(call.fault)
    chosen = [context.choose(caller.key, names, call.asker) for names in call.models]
    await _check_grammars(context, caller, call)
    answer = Answer(
        context,
        caller,
        call,
        prefix + caller.name,
        chosen,
        context.config.stream_keep_alive if call.is_streamed else None,
    )
    watch = asyncio.create_task(_abandon_when_gone(http, answer))

    def end() -> None:
        watch.cancel()
        answer.close()

    headers = {HEADER: caller.name, **version_header(context.registry, answer.requests), **ignored_header(call)}
    try:
        writer = make_writer(answer, call)
        if call.is_streamed:
            packets = _packets(context, answer, writer, await answer.next())
            return EventStream(packets, end, headers, writer.media_type)
        deltas = await answer.whole()
    except BaseException:  # also CancelledError: every way out must close the answer
        end()
        raise
    end()
    headers |= moved_header(answer.moves)
    body = await asyncio.to_thread(writer.whole, deltas) if writer.is_slow else writer.whole(deltas)
    return Response(body, media_type="application/json", headers=headers)


async def _check_grammars(context: AppContext, caller: CallIdentity, call: Call) -> None:
    """Raises RequestError for a grammar that no answer can follow. No request has been sent to an engine yet."""
    for grammar in {sampling.grammar for sampling in call.samplings if sampling.grammar}:
        if not context.has_grammars:
            message = f"{grammar.param} is not supported: this server was started without grammars."
            raise RequestError.bad_field(grammar.param, message)
        await context.room.check(grammar, caller.key.name)


async def _packets(
    context: AppContext, answer: Answer, writer: ResponseWriter, deltas: list[Delta]
) -> AsyncIterator[bytes]:
    """One packet per step, with the tokens of all choices. Tokens that are not shown are no sign of life."""
    sent_at = time.monotonic()
    try:
        while True:
            packet = writer.packet(deltas)
            if not packet and time.monotonic() - sent_at > context.config.stream_keep_alive:
                packet = writer.packet([])
            if packet:
                yield packet
                sent_at = time.monotonic()
            if answer.is_finished:
                break
            deltas = await answer.next()
        yield writer.ending()
    except RequestError as error:
        note(context.on_error, error.fault, answer.caller.key.tenant.name)
        yield writer.failure(error.fault)
    except ClientDisconnect:
        return


async def _abandon_when_gone(http: HttpRequest, answer: Answer) -> None:
    """The body has been read, so the only message that can still come is the disconnect."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    answer.reply.abandon()
