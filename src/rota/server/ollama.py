"""Ollama's routes answer by way of a chat, in lines of JSON. Tools are left to /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

import msgspec
from fastapi import Request as HttpRequest
from fastapi import Response
from pydantic import BaseModel

from rota.core.errors import Fault, RequestError
from rota.core.request import MAX_SEED
from rota.core.version import __version__
from rota.server.access.access import Right
from rota.server.answers.answer import Answer
from rota.server.answers.blocks import AnswerBlocks, BlockStep
from rota.server.answers.respond import ResponseWriter, RotaBody, moves_field, respond
from rota.server.calls.fields import Count, Fields, Unsupported, read_body, within
from rota.server.calls.prompts import Texts
from rota.server.calls.sampling import CommonSampling
from rota.server.context import AppContext
from rota.server.openai.chat_fields import ChatCall
from rota.server.openai.translation import Translation
from rota.server.route import get, list_response, post
from rota.server.streams import Delta

_OPTIONS = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}


class OllamaOptions(CommonSampling):
    n: Literal[1] | None = None
    seed: int | None = within(0, MAX_SEED)
    repeat_penalty: float | None = within(0.001, 10.0)
    num_predict: Count | None = None  # below one: no limit
    num_ctx: Count | None = None  # the context is the server's


class OllamaFields(Fields):
    """A conversation, or a prompt as its only message. Models stay loaded, whatever `keep_alive` says."""

    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    system: str | None = None
    stream: bool | None = None
    format: Literal["json", ""] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    think: bool | None = None
    keep_alive: str | float | None = None
    tools: Unsupported = None
    raw: Unsupported = None
    suffix: Unsupported = None
    images: Unsupported = None
    template: Unsupported = None
    context: Unsupported = None

    def chat(self) -> dict[str, Any]:
        """The body of a chat."""
        options = self.options.model_dump(exclude_none=True, exclude={"num_ctx"}) if self.options else {}
        given = {name: value for name, value in options.items() if name != "num_predict" or value > 0}
        body: dict[str, Any] = {_OPTIONS.get(name, name): value for name, value in given.items()}
        system = [{"role": "system", "content": self.system}] if self.system else []
        asked = [{"role": "user", "content": self.prompt}] if self.messages is None else self.messages
        body |= {"messages": [*system, *asked], "stream": self.stream is not False}
        if self.model:
            body["model"] = self.model.removesuffix(":latest")
        if isinstance(self.format, dict):
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": self.format}}
        elif self.format:
            body["response_format"] = {"type": "json_object"}
        return body | ({} if self.think is None else {"enable_thinking": self.think})


class OllamaBody(BaseModel):
    """An answer, or a line of one. Only the last line has counts."""

    model: str
    created_at: str
    message: dict[str, str] | None = None  # of /api/chat
    response: str | None = None  # of /api/generate
    done: bool
    done_reason: str | None = None
    total_duration: int | None = None
    prompt_eval_count: int | None = None
    eval_count: int | None = None
    rota: RotaBody | None = None


def read_ollama(texts: Texts, raw: bytes) -> ChatCall:
    """Read a body. Raises RequestError for the first field that is wrong."""
    fields = read_body(OllamaFields, raw, texts.unknown)
    fields.refuse_unsupported()
    if (fields.messages is None) == (fields.prompt is None):
        raise RequestError.bad_field("messages", "Send either messages or prompt.")
    names = {name: f"options.{name}" for name in OllamaOptions.model_fields}
    names |= {chat: f"options.{name}" for name, chat in _OPTIONS.items()} | {
        "response_format": "format",
        "enable_thinking": "think",
    }
    names |= {"messages": "prompt", "messages.0.content": "prompt"} if fields.messages is None else {}
    return Translation(fields.chat(), names).read(texts)


def ollama_error(_status: int, message: str) -> dict[str, Any]:
    return {"error": message}


class OllamaWriter(ResponseWriter):
    """A line for each step. The last line, and an answer that is not streamed, has counts and times."""

    media_type = "application/x-ndjson"

    def __init__(self, answer: Answer, _: ChatCall, is_chat: bool) -> None:
        super().__init__(answer)
        self._is_chat = is_chat
        self._blocks = AnswerBlocks()
        self._began_at = time.monotonic_ns()

    def packet(self, deltas: Sequence[Delta]) -> bytes:
        changes = [change for delta in deltas for change in self._blocks.hear(delta) if change.step is BlockStep.ADDED]
        return b"".join([self._line({change.block.kind: change.text}, done=False) for change in changes])

    def ending(self) -> bytes:
        return self._line({}, **self._counts())

    def failure(self, fault: Fault) -> bytes:
        return msgspec.json.encode(ollama_error(0, fault.message)) + b"\n"

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        said = {block.kind: block.text for block in self._blocks.hear_all(deltas)}
        return self._line(said, **self._counts())

    def _line(self, said: Mapping[Any, str], **others: Any) -> bytes:
        thoughts, text = {"thinking": said["reasoning"]} if "reasoning" in said else {}, said.get("text", "")
        words = {"message": {"role": "assistant", "content": text, **thoughts}} if self._is_chat else None
        head = {"model": self.answer.model, "created_at": datetime.now(UTC).isoformat()}
        return msgspec.json.encode({**head, **(words or {"response": text, **thoughts}), **others}) + b"\n"

    def _counts(self) -> dict[str, Any]:
        usage = self.answer.usage
        counts = {"prompt_eval_count": usage.prompt_tokens, "eval_count": usage.output_tokens}
        reason = "length" if self._blocks.finish_reason == "length" else "stop"
        counts |= {"total_duration": time.monotonic_ns() - self._began_at}
        return {"done": True, "done_reason": reason, **counts, **moves_field(self.answer.moves)}


ERRORS = {"/api/": ollama_error}


async def ollama(context: AppContext, http: HttpRequest) -> Response:
    """Continue `messages`, or answer a `prompt`, in Ollama's shape: lines of JSON, unless `stream` is false."""
    make_writer = partial(OllamaWriter, is_chat=http.scope["path"] == "/api/chat")
    return await respond(context, http, read_ollama, make_writer)


async def ollama_tags(context: AppContext, http: HttpRequest) -> Response:
    """The models that a key may use, in Ollama's shape."""
    visible = context.access.visible(context.access.key_of(http))
    details = {"format": "", "family": ""}
    return await list_response(
        '{"models":', ({"name": one.name, "model": one.name, "details": details} for one in visible)
    )


async def ollama_version(_: AppContext) -> dict[str, str]:
    """The server's version, in Ollama's shape."""
    return {"version": __version__}


ROUTES = (
    post("/api/chat", Right.MODEL, ollama, OllamaFields, OllamaBody, also=("POST /api/generate",)),
    get("/api/tags", Right.ANY, ollama_tags),
    get("/api/version", Right.ANY, ollama_version),
)
