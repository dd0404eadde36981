"""The answers of OpenAI's two routes share a head, choices and usage."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from rota.server.answer import Answer, Part
from rota.server.choices import Choice, Chunk, joined
from rota.server.openai.sampling_fields import StreamOptions
from rota.server.prompts import Tokens
from rota.server.shape import DataEvents
from rota.server.version_header import moves_field

_encode = msgspec.json.Encoder().encode


class OpenAiShape(DataEvents):
    """Subclasses write a choice, in a stream and as a whole."""

    event_kind: str
    whole_kind: str

    def __init__(self, answer_id: str, model: str, options: StreamOptions, prompt: Tokens | None = None) -> None:
        """`prompt`: its tokens, if the client wants them beside those of the answer."""
        self._head = {"id": answer_id, "object": self.whole_kind, "created": int(time.time()), "model": model}
        self._options = options
        self._tells_tokens = prompt is not None
        # vLLM's field, in the first event of a stream.
        self._untold = {} if prompt is None else {"prompt_token_ids": prompt}
        # The head of a stream's events is always the same, so it is encoded once.
        self._event_head = _encode(self._head | {"object": self.event_kind})[:-1] + b',"choices":['
        # If the last event has the usage, all other events have the field too. Some clients of OpenAI need that.
        self._event_tail = b'],"usage":null' if options.include_usage else b"]"

    @abstractmethod
    def piece(self, choice: Choice, chunk: Chunk) -> dict[str, Any] | None:
        """A choice in an event of a stream. None: there is nothing to send yet."""

    @abstractmethod
    def complete(self, choice: Choice, chunk: Chunk) -> dict[str, Any]:
        """A choice in an answer that is not streamed."""

    def event(self, answer: Answer, part: Part) -> bytes:
        if (choice := self.piece(part.choice, part.chunk)) is None:
            return b""
        piece = _encode(choice)
        tail = self._event_tail
        if self._options.continuous_usage_stats:
            tail = b'],"usage":' + _encode(_usage(answer))
        if self._untold:
            tail += b"," + _encode(self._untold)[1:-1]
            self._untold = {}
        return self._event_head + piece + tail + b"}"

    def last_event(self, answer: Answer) -> bytes | None:
        told = {"usage": _usage(answer)} if self._options.include_usage else {}
        told |= moves_field(answer.moves)
        return self._event_head + b"]," + _encode(told)[1:] if told else None

    def whole(self, answer: Answer, parts: Sequence[Part]) -> bytes:
        chunks: dict[Choice, list[Chunk]] = {choice: [] for choice in answer.choices}
        for part in parts:
            chunks[part.choice].append(part.chunk)
        whole = {choice: joined(said) for choice, said in chunks.items()}
        choices = [self.complete(choice, chunk) for choice, chunk in whole.items()]
        about_prompt = self.about_prompt(whole[answer.choices[0]])
        more = {**self._untold, **about_prompt, **moves_field(answer.moves)}
        return _encode({**self._head, "choices": choices, "usage": _usage(answer), **more})

    def about_prompt(self, _first: Chunk) -> dict[str, Any]:
        """More about the prompt, for the end of an answer that is not streamed. `_first`: the first choice."""
        return {}


def _usage(answer: Answer) -> dict[str, Any]:
    usage = answer.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
