"""Every route that generates answers here, whole or streamed, in any shape."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from fastapi import Request as HttpRequest
from fastapi import Response

from rota.core.errors import RequestError
from rota.server.answer import Answer, ParsedCall, Part
from rota.server.errors import ClientGone, note
from rota.server.front import Front
from rota.server.grammars import check_grammars
from rota.server.names import HEADER
from rota.server.shape import Hears, OnlyWhole, Shape
from rota.server.sse import EventStream
from rota.server.version_header import moved_header, version_header


async def respond(front: Front, http: HttpRequest, parsed: ParsedCall, shape: Shape, is_streamed: bool) -> Response:
    """Answer a call. An error before the first byte has its own status, also for a stream.

    A stream's headers leave with its first token, or after `keep_alive_s` without a token. From then on, empty lines
    keep it alive, and an error is its last event. When the client leaves, its requests end.
    """
    await check_grammars(front, parsed)
    answer = Answer(front, parsed, front.keep_alive_s if is_streamed else None)
    watch = asyncio.create_task(_abandon_when_gone(http, answer))

    def end() -> None:
        watch.cancel()
        answer.close()

    headers = {HEADER: parsed.call.name, **version_header(front.registry, parsed.requests)}
    try:
        if is_streamed:
            packets = _packets(front, answer, shape, await answer.next())
            return EventStream(packets, end, headers, shape.media_type)
        parts = await answer.whole(shape.hear if isinstance(shape, Hears) else None)
    except BaseException:  # also CancelledError: every way out must close the answer
        end()
        raise
    end()
    headers |= moved_header(answer.moves)
    is_large = isinstance(shape, OnlyWhole)
    body = await asyncio.to_thread(shape.whole, answer, parts) if is_large else shape.whole(answer, parts)
    return Response(body, media_type="application/json", headers=headers)


async def _packets(front: Front, answer: Answer, shape: Shape, parts: list[Part]) -> AsyncIterator[bytes]:
    """One packet per step, with the tokens of all choices. Tokens that are not shown are no sign of life."""
    sent_at = time.monotonic()
    try:
        while True:
            packet = shape.packet(answer, parts)
            if not packet and time.monotonic() - sent_at > front.keep_alive_s:
                packet = shape.packet(answer, [])
            if packet:
                yield packet
                sent_at = time.monotonic()
            if answer.is_finished:
                break
            parts = await answer.next()
        yield shape.ending(answer)
    except RequestError as error:
        note(front.on_error, error.fault)
        yield shape.failure(error.fault)
    except ClientGone:
        return


async def _abandon_when_gone(http: HttpRequest, answer: Answer) -> None:
    """The body has been read, so the only message that can still come is the disconnect."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    answer.reply.abandon()
