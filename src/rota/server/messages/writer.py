"""POST /v1/messages answers with one message whole, or with events that say how its blocks grow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
from fastapi import Request as HttpRequest
from fastapi import Response
from pydantic import BaseModel

from rota.core.errors import Fault
from rota.server.access.access import Right
from rota.server.answers.answer import Answer
from rota.server.answers.blocks import AnswerBlocks, Block, BlockStep, Change
from rota.server.answers.respond import ResponseWriter, RotaBody, moves_field, named_event, respond
from rota.server.context import AppContext
from rota.server.errors import ERROR_KINDS, error_type
from rota.server.messages.call import MessagesFields, PromptFields, read_count, read_messages
from rota.server.openai.chat_fields import ChatCall
from rota.server.openai.tokenize_routes import answer_at_once
from rota.server.route import post
from rota.server.streams import Delta

# ── errors ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# Errors in Anthropic's shape.

# Where Anthropic's word is another than OpenAI's.
_BY_STATUS = {404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}
_BY_TYPE = {"server_error": "api_error"}


def messages_error(status: int, message: str) -> dict[str, Any]:
    """The body of an error with this status, and the last event of a stream that failed."""
    usual = error_type(status)
    kind = _BY_STATUS.get(status) or _BY_TYPE.get(usual, usual)
    return {"type": "error", "error": {"type": kind, "message": message}}


ERRORS = {"/v1/messages": messages_error}


# ── bodies ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# The response bodies of /v1/messages, for /docs.


class MessageUsageBody(BaseModel):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    rota: RotaBody | None = None


class MessageBody(BaseModel):
    """The next message of a conversation, as blocks."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsageBody


class MessageEventBody(BaseModel):
    """How a message grows. The kind of an event says which other fields it has."""

    type: str


class TokenCountBody(BaseModel):
    """The length of a prompt."""

    input_tokens: int


# ── shape ───────────────────────────────────────────────────────────────────────────────────────────────────────────

_REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "abort": "max_tokens"}
_PING: dict[str, Any] = {"type": "ping"}


class MessagesWriter(ResponseWriter):
    """For an answer with one choice."""

    def __init__(self, answer: Answer, _: ChatCall) -> None:
        super().__init__(answer)
        self._head = {"id": answer.answer_id, "type": "message", "role": "assistant", "model": answer.model}
        self._blocks = AnswerBlocks()
        self._is_begun = False

    def packet(self, deltas: Sequence[Delta]) -> bytes:
        opening = b"" if self._is_begun else self._opening()
        events = [event for delta in deltas for change in self._blocks.hear(delta) for event in _events(change)]
        return opening + b"".join(map(_written, events if deltas else [_PING]))

    def ending(self) -> bytes:
        delta = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        return _written(delta) + _written({"type": "message_stop"})

    def failure(self, fault: Fault) -> bytes:
        return _written(messages_error(ERROR_KINDS[fault.code].status, fault.message))

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        content = [_block(block) for block in self._blocks.hear_all(deltas)]
        return msgspec.json.encode({**self._head, "content": content, **self._stop(), "usage": self._usage()})

    def _opening(self) -> bytes:
        self._is_begun = True
        nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = {**self._head, **nothing, "usage": self._usage() | {"output_tokens": 0}}
        return _written({"type": "message_start", "message": message}) + _written(_PING)

    def _stop(self) -> dict[str, Any]:
        """Why the answer ended, and by which of the client's texts."""
        reason = _REASONS.get(self._blocks.finish_reason or "", "end_turn")
        matched = self.answer.choices[0].matched_stop if reason == "end_turn" else None
        return {"stop_reason": "stop_sequence" if matched else reason, "stop_sequence": matched}

    def _usage(self) -> dict[str, Any]:
        """Here, tokens that were found in the cache are counted apart."""
        usage = self.answer.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.output_tokens,
            **moves_field(self.answer.moves),
        }


def _written(event: dict[str, Any]) -> bytes:
    return named_event(event["type"], msgspec.json.encode(event))


def _events(change: Change) -> Iterator[dict[str, Any]]:
    index = change.block.index
    match change.step:
        case BlockStep.BEGUN:
            empty = Block(index, change.block.kind, change.block.call)
            yield {"type": "content_block_start", "index": index, "content_block": _block(empty)}
        case BlockStep.ADDED:
            yield {"type": "content_block_delta", "index": index, "delta": _delta(change)}
        case BlockStep.ENDED:
            yield {"type": "content_block_stop", "index": index}


def _delta(change: Change) -> dict[str, str]:
    match change.block.kind:
        case "reasoning":
            return {"type": "thinking_delta", "thinking": change.text}
        case "call":
            return {"type": "input_json_delta", "partial_json": change.text}
    return {"type": "text_delta", "text": change.text}


def _block(block: Block) -> dict[str, Any]:
    match block.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case "call":
            return {
                "type": "tool_use",
                "id": block.call.call_id,
                "name": block.call.name,
                "input": block.arguments,
            }
    return {"type": "text", "text": block.text}


async def messages(context: AppContext, http: HttpRequest) -> Response:
    """Continue a conversation, in Anthropic's shape; errors are in that shape too."""
    return await respond(context, http, read_messages, MessagesWriter, "msg_")


async def count_tokens(context: AppContext, http: HttpRequest) -> Response:
    """The number of tokens of a conversation, in Anthropic's shape."""
    return await answer_at_once(context, http, read_count)


ROUTES = (
    post("/v1/messages", Right.MODEL, messages, MessagesFields, MessageBody, MessageEventBody),
    post("/v1/messages/count_tokens", Right.MODEL, count_tokens, PromptFields, TokenCountBody),
)
