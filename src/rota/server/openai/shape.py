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
from rota.server.shape import DataEvents

_encode = msgspec.json.Encoder().encode


class OpenAiShape(DataEvents):
    """Subclasses write a choice, in a stream and as a whole."""

    event_kind: str
    whole_kind: str

    def __init__(self, answer_id: str, model: str, options: StreamOptions) -> None:
        self._head = {"id": answer_id, "object": self.whole_kind, "created": int(time.time()), "model": model}
        self._options = options
        # The head of a stream's events is always the same, so it is encoded once.
        self._event_head = _encode(self._head | {"object": self.event_kind})[:-1] + b',"choices":['
        # If the last event has the usage, all other events have the field too. Some clients of OpenAI need that.
        self._event_tail = b'],"usage":null}' if options.include_usage else b"]}"

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
        if self._options.continuous_usage_stats:
            return self._event_head + piece + b'],"usage":' + _encode(_usage(answer)) + b"}"
        return self._event_head + piece + self._event_tail

    def last_event(self, answer: Answer) -> bytes | None:
        if not self._options.include_usage:
            return None
        return self._event_head + b'],"usage":' + _encode(_usage(answer)) + b"}"

    def whole(self, answer: Answer, parts: Sequence[Part]) -> bytes:
        chunks: dict[Choice, list[Chunk]] = {choice: [] for choice in answer.choices}
        for part in parts:
            chunks[part.choice].append(part.chunk)
        choices = [self.complete(choice, joined(said)) for choice, said in chunks.items()]
        return _encode({**self._head, "choices": choices, "usage": _usage(answer)})


def _usage(answer: Answer) -> dict[str, Any]:
    usage = answer.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
