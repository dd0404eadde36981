"""POST /v1/completions: prompts in, continuations out, in OpenAI's shape."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
from fastapi import Request, Response

from rota.core.errors import RequestError
from rota.runtime.registry import Registry
from rota.server.answers import CompletionAnswer, Part
from rota.server.errors import ClientGone, error_body
from rota.server.fields import CompletionFields, Prompt, read_body
from rota.server.sse import DONE, EventStream, sse_event
from rota.server.streams import Reply, Streams
from rota.text.tokenizer import Tokenizer


class Completions:
    """The route's handler."""

    def __init__(self, streams: Streams, tokenizer: Tokenizer, registry: Registry) -> None:
        self._streams = streams
        self._tokenizer = tokenizer
        self._registry = registry

    async def __call__(self, http: Request) -> Response:
        fields = read_body(CompletionFields, await http.body())
        answer = await self._prepare(fields)
        wants_usage = fields.wants_usage()

        reply = self._streams.open(answer.requests())
        watch = asyncio.create_task(_abandon_when_gone(http, reply))

        def end() -> None:
            watch.cancel()
            reply.close()

        try:
            # An error that is known before the first byte has its own status, also for a stream.
            parts = answer.push(reply, await reply.next())
            if fields.stream:
                return EventStream(_packets(answer, reply, parts, wants_usage), on_end=end)
            while not answer.is_finished:
                parts += answer.push(reply, await reply.next())
        except BaseException:
            end()
            raise
        end()
        return Response(msgspec.json.encode(answer.whole(parts)), media_type="application/json")

    async def _prepare(self, fields: CompletionFields) -> CompletionAnswer:
        model = self._registry.find(fields.model)
        fields.refuse_unsupported()
        sampling = fields.sampling(fields.DEFAULT_MAX_TOKENS, fields.logprobs, self._tokenizer.eos_ids)
        # In a thread, since a book takes the tokenizer longer than others should wait for their next token.
        prompts = await asyncio.to_thread(_tokenized, self._tokenizer, fields.prompt)
        return CompletionAnswer(self._tokenizer, model, prompts, sampling, fields.choices())


async def _packets(
    answer: CompletionAnswer, reply: Reply, parts: list[Part], wants_usage: bool
) -> AsyncIterator[bytes]:
    """One packet for a step's worth of tokens, however many choices they belong to."""
    try:
        while True:
            if packet := b"".join(sse_event(answer.event(part)) for part in parts if part.has_news):
                yield packet
            if answer.is_finished:
                break
            parts = answer.push(reply, await reply.next())
        yield (sse_event(answer.usage_event()) if wants_usage else b"") + DONE
    except RequestError as error:
        yield sse_event(error_body(error.fault)) + DONE
    except ClientGone:
        return


async def _abandon_when_gone(http: Request, reply: Reply) -> None:
    """The body is read, so all that can still come is the news that the client left."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    reply.abandon()


def _tokenized(tokenizer: Tokenizer, prompt: Prompt) -> list[tuple[int, ...]]:
    """Every prompt of a call as tokens; raises RequestError for ids that are no tokens."""
    if isinstance(prompt, str):
        return [tokenizer.encode(prompt)]
    if not prompt:
        raise RequestError.bad_field("prompt", "prompt is an empty list; send at least one token or text.")
    if isinstance(prompt[0], int):
        return [_checked(tokenizer, prompt)]
    return [tokenizer.encode(item) if isinstance(item, str) else _checked(tokenizer, item) for item in prompt]


def _checked(tokenizer: Tokenizer, tokens: list[int]) -> tuple[int, ...]:
    for token in tokens:
        if not 0 <= token < tokenizer.vocab_size:
            raise RequestError.bad_field(
                "prompt", f"prompt holds the token id {token}; ids lie between 0 and {tokenizer.vocab_size - 1}."
            )
    return tuple(tokens)
