"""The shape of /v1/responses: one object whole, or events that say how it grows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from rota.core.errors import Fault, FaultCode
from rota.server.answer import Answer, Part
from rota.server.blocks import Blocks
from rota.server.choices import Chunk
from rota.server.openai.logprobs import TokenNamer, chat_logprobs
from rota.server.responses.call import ResponsesCall
from rota.server.responses.output import Event, Output
from rota.server.sse import WAITING, named_event
from rota.server.version_header import moves_field

_ERROR_CODES = {
    FaultCode.RATE_LIMITED: "rate_limit_exceeded",
    FaultCode.QUEUE_FULL: "rate_limit_exceeded",
    FaultCode.BAD_FIELD: "invalid_prompt",
    FaultCode.PROMPT_TOO_LONG: "invalid_prompt",
    FaultCode.KV_TOO_SMALL: "invalid_prompt",
}
_CUT = {"length": "max_output_tokens", "abort": "aborted"}


class ResponsesShape:
    """For an answer with one choice. Every event has a number."""

    media_type = "text/event-stream"

    def __init__(self, answer_id: str, model: str, read: ResponsesCall, namer: TokenNamer) -> None:
        self._head = {"id": answer_id, "object": "response", "created_at": int(time.time()), "model": model}
        self._head |= read.echoed
        self._blocks = Blocks(read.chat.speech)
        self._output = Output(answer_id)
        self._namer = namer if read.chat.has_logprobs else None
        self._events = 0

    def packet(self, _answer: Answer, parts: Sequence[Part]) -> bytes:
        opening = b"" if self._events else self._opening()
        news = b"".join([self._written(event) for part in parts for event in self._heard(part)])
        return opening + news or (WAITING if not parts else b"")

    def ending(self, answer: Answer) -> bytes:
        response = self._response(answer, self._blocks.finish_reason)
        return self._written((f"response.{response['status']}", {"response": response}))

    def failure(self, fault: Fault) -> bytes:
        opening = b"" if self._events else self._opening()
        error = {"code": _ERROR_CODES.get(fault.code, "server_error"), "message": fault.message}
        response = {**self._head, "status": "failed", "error": error, "incomplete_details": None}
        response |= {"output": self._items("incomplete"), "usage": None}
        return opening + self._written(("response.failed", {"response": response}))

    def hear(self, part: Part) -> None:
        """Token by token: those of thoughts are counted."""
        self._output.logprobs += self._logprobs(part.chunk)
        self._blocks.gather(part)

    def whole(self, answer: Answer, parts: Sequence[Part]) -> bytes:
        self._blocks.hear_all(parts)
        return msgspec.json.encode(self._response(answer, self._blocks.finish_reason))

    def _heard(self, part: Part) -> Iterator[Event]:
        self._output.logprobs += self._logprobs(part.chunk)
        for change in self._blocks.hear(part):
            yield from self._output.events(change, self._status)

    def _opening(self) -> bytes:
        begun = {**self._head, "status": "in_progress", "error": None, "incomplete_details": None}
        begun |= {"output": [], "usage": None}
        names = ("response.created", "response.in_progress")
        return b"".join([self._written((name, {"response": begun})) for name in names])

    def _written(self, event: Event) -> bytes:
        name, fields = event
        numbered = {"type": name, "sequence_number": self._events, **fields}
        self._events += 1
        return named_event(name, msgspec.json.encode(numbered))

    def _logprobs(self, chunk: Chunk) -> list[dict[str, Any]]:
        if self._namer is None or not chunk.logprobs:
            return []
        written: list[dict[str, Any]] = chat_logprobs(self._namer, chunk)["content"]
        return written

    @property
    def _status(self) -> str:
        return "incomplete" if self._blocks.finish_reason in _CUT else "completed"

    def _response(self, answer: Answer, finish_reason: str | None) -> dict[str, Any]:
        cut = _CUT.get(finish_reason or "")
        return {
            **self._head,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": cut} if cut else None,
            "completed_at": None if cut else int(time.time()),
            "output": self._items(self._status),
            "usage": self._usage(answer),
        }

    def _items(self, last_status: str) -> list[dict[str, Any]]:
        """Every item but the last is complete."""
        last = len(self._blocks.all) - 1
        statuses = (last_status if block.index == last else "completed" for block in self._blocks.all)
        return list(map(self._output.item, self._blocks.all, statuses))

    def _usage(self, answer: Answer) -> dict[str, Any]:
        usage = answer.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self._blocks.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.output_tokens,
            **moves_field(answer.moves),
        }
