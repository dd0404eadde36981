"""POST /v1/responses answers with one object whole, or with events that say how it grows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
from fastapi import Request as HttpRequest
from fastapi import Response
from pydantic import BaseModel

from rota.core.errors import Fault, FaultCode
from rota.server.access.access import Right
from rota.server.answers.answer import Answer
from rota.server.answers.blocks import AnswerBlocks, Block, BlockStep, Change
from rota.server.answers.respond import WAITING, ResponseWriter, RotaBody, moves_field, named_event, respond
from rota.server.context import AppContext
from rota.server.openai.chat_fields import ChatCall
from rota.server.openai.writer import TokenNamer, chat_logprobs
from rota.server.responses.call import ResponsesFields, read_responses
from rota.server.route import post
from rota.server.streams import Delta

# ── output ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# The output of /v1/responses: blocks become items, and their changes become events.

Event = tuple[str, dict[str, Any]]

_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
# The events of a text, by the kind of its block.
_DELTAS = {
    "reasoning": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}


class Output:
    """Writes the items of one answer. `logprobs` of the last deltas are taken by the next event with text."""

    def __init__(self, answer_id: str) -> None:
        self._name = answer_id.removeprefix("resp_")
        self.logprobs: list[dict[str, Any]] = []
        self._kept: list[dict[str, Any]] = []

    def item(self, block: Block, status: str) -> dict[str, Any]:
        head = {"id": self._id(block), "status": status}
        if block.kind == "call":
            call = {"call_id": block.call.call_id, "name": block.call.name, "arguments": block.text}
            return {**head, "type": "function_call", **call}
        parts = [] if status == "in_progress" else [self._part(block)]
        if block.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": parts, "encrypted_content": None}
        return {**head, "type": "message", "role": "assistant", "content": parts}

    def events(self, change: Change, status: str) -> Iterator[Event]:
        """The events of a change; `status` is that of an item that ends."""
        match change.step:
            case BlockStep.BEGUN:
                yield from self._begin(change.block)
            case BlockStep.ADDED:
                kind = change.block.kind
                logprobs = {"logprobs": self._taken()} if kind == "text" else {}
                yield f"{_DELTAS[kind]}.delta", self._at(change.block) | {"delta": change.text} | logprobs
            case BlockStep.ENDED:
                yield from self._end(change.block, status)

    def _begin(self, block: Block) -> Iterator[Event]:
        item = {**self.item(block, "in_progress"), **({"arguments": ""} if block.kind == "call" else {})}
        yield "response.output_item.added", {"output_index": block.index, "item": item}
        if block.kind != "call":
            yield "response.content_part.added", self._at(block) | {"part": self._part(Block(block.index, block.kind))}

    def _end(self, block: Block, status: str) -> Iterator[Event]:
        if block.kind == "call":
            done = {"name": block.call.name, "arguments": block.text}
            yield f"{_DELTAS['call']}.done", self._at(block) | done
        else:
            logprobs = {"logprobs": self._kept} if block.kind == "text" else {}
            yield f"{_DELTAS[block.kind]}.done", self._at(block) | {"text": block.text} | logprobs
            yield "response.content_part.done", self._at(block) | {"part": self._part(block)}
        yield "response.output_item.done", {"output_index": block.index, "item": self.item(block, status)}

    def _at(self, block: Block) -> dict[str, Any]:
        place = {"item_id": self._id(block), "output_index": block.index}
        return place if block.kind == "call" else {**place, "content_index": 0}

    def _part(self, block: Block) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": self._kept + self.logprobs}

    def _taken(self) -> list[dict[str, Any]]:
        taken, self.logprobs = self.logprobs, []
        self._kept += taken
        return taken

    def _id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self._name}_{block.index}"


# ── bodies ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# The response bodies of /v1/responses, for /docs.


class ResponseUsageBody(BaseModel):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int
    rota: RotaBody | None = None


class ResponseBody(BaseModel):
    """The next turn of a conversation, as items."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete", "in_progress", "failed"]
    output: list[dict[str, Any]]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    usage: ResponseUsageBody | None


class ResponseEventBody(BaseModel):
    """How a response grows. The kind of an event says which other fields it has."""

    type: str
    sequence_number: int


# ── shape ───────────────────────────────────────────────────────────────────────────────────────────────────────────

_ERROR_CODES = {
    FaultCode.RATE_LIMITED: "rate_limit_exceeded",
    FaultCode.QUEUE_FULL: "rate_limit_exceeded",
    FaultCode.BAD_FIELD: "invalid_prompt",
    FaultCode.PROMPT_TOO_LONG: "context_length_exceeded",
}
_CUT = {"length": "max_output_tokens", "abort": "aborted"}


class ResponsesWriter(ResponseWriter):
    """For an answer with one choice. Every event has a number."""

    def __init__(self, answer: Answer, call: ChatCall) -> None:
        super().__init__(answer)
        created = int(time.time())
        self._head = {"id": answer.answer_id, "object": "response", "created_at": created, "model": answer.model}
        self._head |= call.echoed
        self._blocks = AnswerBlocks()
        self._output = Output(answer.answer_id)
        self._namer = TokenNamer(answer.tokenizer.pieces) if call.has_logprobs else None
        self._events = 0

    def packet(self, deltas: Sequence[Delta]) -> bytes:
        opening = b"" if self._events else self._opening()
        news = b"".join([self._written(event) for delta in deltas for event in self._heard(delta)])
        return opening + news or (WAITING if not deltas else b"")

    def ending(self) -> bytes:
        response = self._response()
        return self._written((f"response.{response['status']}", {"response": response}))

    def failure(self, fault: Fault) -> bytes:
        opening = b"" if self._events else self._opening()
        error = {"code": _ERROR_CODES.get(fault.code, "server_error"), "message": fault.message}
        response = {**self._head, "status": "failed", "error": error, "incomplete_details": None}
        response |= {"output": self._items("incomplete"), "usage": None}
        return opening + self._written(("response.failed", {"response": response}))

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        for delta in deltas:
            self._output.logprobs += self._logprobs(delta)
        self._blocks.hear_all(deltas)
        return msgspec.json.encode(self._response())

    def _heard(self, delta: Delta) -> Iterator[Event]:
        self._output.logprobs += self._logprobs(delta)
        for change in self._blocks.hear(delta):
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

    def _logprobs(self, delta: Delta) -> list[dict[str, Any]]:
        if self._namer is None or not delta.logprobs:
            return []
        written: list[dict[str, Any]] = chat_logprobs(self._namer, delta)["content"]
        return written

    @property
    def _status(self) -> str:
        return "incomplete" if self._blocks.finish_reason in _CUT else "completed"

    def _response(self) -> dict[str, Any]:
        cut = _CUT.get(self._blocks.finish_reason or "")
        return {
            **self._head,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": cut} if cut else None,
            "completed_at": None if cut else int(time.time()),
            "output": self._items(self._status),
            "usage": self._usage(),
        }

    def _items(self, last_status: str) -> list[dict[str, Any]]:
        """Every item but the last is complete."""
        last = len(self._blocks.all) - 1
        statuses = (last_status if block.index == last else "completed" for block in self._blocks.all)
        return list(map(self._output.item, self._blocks.all, statuses))

    def _usage(self) -> dict[str, Any]:
        usage = self.answer.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.answer.choices[0].thought_tokens},
            "total_tokens": usage.prompt_tokens + usage.output_tokens,
            **moves_field(self.answer.moves),
        }


async def responses(context: AppContext, http: HttpRequest) -> Response:
    """Continue a conversation of items. Nothing is stored, so every call sends the whole conversation."""
    return await respond(context, http, read_responses, ResponsesWriter, "resp_")


ROUTES = (post("/v1/responses", Right.MODEL, responses, ResponsesFields, ResponseBody, ResponseEventBody),)
