"""Ollama's routes answer by way of a chat, in lines of JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
from fastapi import Request as HttpRequest
from fastapi import Response
from pydantic import BaseModel

from rota.core.errors import Fault
from rota.server.access.access import Right
from rota.server.answers.answer import Answer
from rota.server.answers.blocks import AnswerBlocks, Block, BlockStep, Change
from rota.server.answers.respond import ResponseWriter, RotaBody, moves_field, respond
from rota.server.answers.vectors import vector_of
from rota.server.calls.call import Call
from rota.server.calls.fields import read_body
from rota.server.context import AppContext
from rota.server.ollama.call import EmbedFields, OllamaFields, OllamaModelFields, base_of, read_embed, read_ollama
from rota.server.openai.chat_fields import ChatCall
from rota.server.route import get, list_response, post
from rota.server.routes.info import version
from rota.server.streams import Delta
from rota.text.speech import ParserNames


class OllamaBody(BaseModel):
    """An answer, or a line of one. Only the last line has counts."""

    model: str
    created_at: str
    message: dict[str, Any] | None = None  # of /api/chat
    response: str | None = None  # of /api/generate
    done: bool
    done_reason: str | None = None
    total_duration: int | None = None
    prompt_eval_count: int | None = None
    eval_count: int | None = None
    rota: RotaBody | None = None


def ollama_error(_status: int, message: str) -> dict[str, Any]:
    return {"error": message}


class EmbedBody(BaseModel):
    """A vector for each text."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    prompt_eval_count: int


class EmbedWriter(ResponseWriter):
    is_slow = True

    def __init__(self, answer: Answer, _: Call, is_old: bool) -> None:
        super().__init__(answer)
        self._is_old = is_old
        self._began_at = time.monotonic_ns()

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        vectors = [vector_of(delta) for delta in deltas]
        if self._is_old:
            return msgspec.json.encode({"embedding": vectors[0]})
        counts = {"prompt_eval_count": self.answer.usage.prompt_tokens}
        counts |= {"total_duration": time.monotonic_ns() - self._began_at}
        return msgspec.json.encode({"model": self.answer.model, "embeddings": vectors, **counts})


class OllamaWriter(ResponseWriter):
    """A line for each step. The last line, and an answer that is not streamed, has counts and times."""

    media_type = "application/x-ndjson"

    def __init__(self, answer: Answer, _: ChatCall, is_chat: bool) -> None:
        super().__init__(answer)
        self._is_chat = is_chat
        self._blocks = AnswerBlocks()
        self._began_at = time.monotonic_ns()

    def packet(self, deltas: Sequence[Delta]) -> bytes:
        changes = [change for delta in deltas for change in self._blocks.hear(delta)]
        return b"".join([self._line(said, done=False) for change in changes if (said := _news(change))])

    def ending(self) -> bytes:
        return self._line({}, **self._counts())

    def failure(self, fault: Fault) -> bytes:
        return msgspec.json.encode(ollama_error(0, fault.message)) + b"\n"

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        blocks = self._blocks.hear_all(deltas)
        said: dict[str, Any] = {_NAMES[block.kind]: block.text for block in blocks if block.kind in _NAMES}
        if calls := [_call(block) for block in blocks if block.kind == "call"]:
            said["tool_calls"] = calls
        return self._line(said, **self._counts())

    def _line(self, said: Mapping[str, Any], **others: Any) -> bytes:
        words = {"content": "", **said}
        if self._is_chat:
            words = {"message": {"role": "assistant", **words}}
        else:
            words["response"] = words.pop("content")
        head = {"model": self.answer.model, "created_at": datetime.now(UTC).isoformat()}
        return msgspec.json.encode({**head, **words, **others}) + b"\n"

    def _counts(self) -> dict[str, Any]:
        usage = self.answer.usage
        counts = {"prompt_eval_count": usage.prompt_tokens, "eval_count": usage.output_tokens}
        reason = "length" if self._blocks.finish_reason == "length" else "stop"
        counts |= {"total_duration": time.monotonic_ns() - self._began_at}
        return {"done": True, "done_reason": reason, **counts, **moves_field(self.answer.moves)}


_NAMES = {"text": "content", "reasoning": "thinking"}


def _news(change: Change) -> dict[str, Any] | None:
    """The part of a message that a change brings. A call comes whole, when it has ended."""
    block = change.block
    if block.kind == "call":
        return {"tool_calls": [_call(block)]} if change.step is BlockStep.ENDED else None
    return {_NAMES[block.kind]: change.text} if change.step is BlockStep.ADDED else None


def _call(block: Block) -> dict[str, Any]:
    function = {"index": block.call.index, "name": block.call.name, "arguments": block.arguments}
    return {"id": block.call.call_id, "function": function}


ERRORS = {"/api/": ollama_error}

# Models are loaded with the server, and stay.
_BEGAN, _NEVER = datetime.now(UTC).isoformat(), datetime.max.replace(tzinfo=UTC).isoformat()
_DETAILS = {
    "parent_model": "",
    "format": "",
    "family": "",
    "families": [],
    "parameter_size": "",
    "quantization_level": "",
}


async def ollama(context: AppContext, http: HttpRequest) -> Response:
    """Continue `messages`, or answer a `prompt`, in Ollama's shape: lines of JSON, unless `stream` is false."""
    make_writer = partial(OllamaWriter, is_chat=http.scope["path"] == "/api/chat")
    return await respond(context, http, read_ollama, make_writer)


async def ollama_models(context: AppContext, http: HttpRequest) -> Response:
    """The models that a key may use, in Ollama's shape. All are loaded, and stay."""
    visible = context.access.visible(context.access.key_of(http))
    capacity = context.service.state.capacity
    longest = capacity.max_sequence_tokens if capacity else None
    about = {"modified_at": _BEGAN, "expires_at": _NEVER, "size": 0, "size_vram": 0, "digest": ""}
    return await list_response(
        '{"models":',
        (
            {"name": one.name, "model": one.name, "details": _DETAILS, "context_length": longest, **about}
            for one in visible
        ),
    )


async def ollama_show(context: AppContext, http: HttpRequest) -> dict[str, Any]:
    """What a client may ask of a model, in Ollama's shape."""
    fields = read_body(OllamaModelFields, await http.body())
    asked = fields.model or fields.name
    found = context.access.find(context.access.key_of(http), asked and base_of(asked))
    chat, capacity = context.tokenizer.chat, context.service.state.capacity
    parsers = ParserNames(context.config.tool_call_parser, context.config.reasoning_parser)
    can = {"completion": True, "tools": bool(parsers.tools_of(chat)), "thinking": bool(parsers.reasoning_of(chat))}
    base = context.registry.base
    return {
        "modelfile": "",
        "parameters": "",
        "template": chat.default or "",
        "modified_at": _BEGAN,
        "details": {**_DETAILS, "parent_model": "" if found is base else base.name},
        "model_info": {
            "general.architecture": "rota",
            "general.basename": base.name,
            "rota.context_length": capacity and capacity.max_sequence_tokens,
        },
        "capabilities": [name for name, has in can.items() if has],
    }


async def ollama_embed(context: AppContext, http: HttpRequest) -> Response:
    """Texts as vectors of length one, in Ollama's shape."""
    make_writer = partial(EmbedWriter, is_old=http.scope["path"] == "/api/embeddings")
    return await respond(context, http, read_embed, make_writer, "embd-")


ROUTES = (
    post("/api/chat", Right.MODEL, ollama, OllamaFields, OllamaBody, also=("POST /api/generate",)),
    post("/api/embed", Right.MODEL, ollama_embed, EmbedFields, EmbedBody, also=("POST /api/embeddings",)),
    post("/api/show", Right.MODEL, ollama_show, OllamaModelFields),
    get("/api/tags", Right.ANY, ollama_models, also=("GET /api/ps",)),
    get("/api/version", Right.ANY, version),
)
