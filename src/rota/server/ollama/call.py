"""A body of Ollama's routes is checked, and becomes a chat's or that of a call for vectors."""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Literal

from pydantic import Field

from rota.core.errors import RequestError
from rota.core.request import MAX_SEED, SamplingParams
from rota.server.calls.call import Call, ModelNames
from rota.server.calls.fields import Count, Fields, Unsupported, read_body, within
from rota.server.calls.prompts import PromptReading, Texts
from rota.server.calls.sampling import CommonSampling
from rota.server.openai.chat_fields import ChatCall
from rota.server.openai.translation import Translation

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
    think: bool | Literal["low", "medium", "high"] | None = None
    tools: list[dict[str, Any]] | None = None
    keep_alive: str | float | None = None
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
        asked = [{"role": "user", "content": self.prompt}] if self.messages is None else _as_chats(self.messages)
        body |= {"messages": [*system, *asked], "stream": self.stream is not False}
        if self.model:
            body["model"] = base_of(self.model)
        if self.tools:
            body["tools"] = self.tools
        if isinstance(self.format, dict):
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": self.format}}
        elif self.format:
            body["response_format"] = {"type": "json_object"}
        if self.think is not None:
            body["enable_thinking" if isinstance(self.think, bool) else "reasoning_effort"] = self.think
        return body


class OllamaModelFields(Fields):
    """Which model is asked about: `name` is the older name of the field."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


class EmbedFields(Fields):
    """Texts to be turned into vectors. `prompt` is that of the older route."""

    model: str | None = None
    input: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    prompt: str | None = None
    # False: a text that does not fit the context is refused. Otherwise its last tokens count.
    truncate: bool | None = None
    keep_alive: str | float | None = None
    options: dict[str, Any] | None = None  # no token is drawn
    dimensions: Unsupported = None


def base_of(model: str) -> str:
    """A name without the tag that Ollama adds."""
    return model.removesuffix(":latest")


def _as_chats(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as a chat has them. Calls get ids here: a result answers the first open call of its tool's name."""
    chats: list[dict[str, Any]] = []
    open_calls: list[tuple[str, Any]] = []
    numbers = itertools.count()
    for message in messages:
        chat = {("reasoning_content" if name == "thinking" else name): value for name, value in message.items()}
        tool = chat.pop("tool_name", None)
        if isinstance(calls := chat.get("tool_calls"), list):
            chat["tool_calls"] = [_call(call, next(numbers)) for call in calls]
            open_calls += [(call["id"], call["function"].get("name")) for call in chat["tool_calls"]]
        if chat.get("role") == "tool" and "tool_call_id" not in chat:
            answered = next((one for one in open_calls if tool in (None, one[1])), None)
            if answered:
                chat["tool_call_id"] = answered[0]
                open_calls.remove(answered)
        chats.append(chat)
    return chats


def _call(call: Any, number: int) -> dict[str, Any]:
    """Nine characters: Mistral's templates take ids of no other length."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise RequestError.bad_field("messages", "messages: each of tool_calls must be an object with a function.")
    named = {name: value for name, value in function.items() if name != "index"}
    return {"type": "function", **call, "function": named, "id": call.get("id") or f"call{number:05}"}


def read_ollama(texts: Texts, raw: bytes) -> ChatCall:
    """Read a body. Raises RequestError for the first field that is wrong."""
    fields = read_body(OllamaFields, raw, texts.unknown)
    fields.refuse_unsupported()
    if (fields.messages is None) == (fields.prompt is None):
        raise RequestError.bad_field("messages", "Send either messages or prompt.")
    names = {name: f"options.{name}" for name in OllamaOptions.model_fields}
    names |= {chat: f"options.{name}" for name, chat in _OPTIONS.items()} | {"response_format": "format"}
    names |= dict.fromkeys(("enable_thinking", "reasoning_effort"), "think")
    names |= {"messages": "prompt", "messages.0.content": "prompt"} if fields.messages is None else {}
    return Translation(fields.chat(), names).read(texts)


def read_embed(texts: Texts, raw: bytes) -> Call:
    """Read a body. Raises RequestError for the first field that is wrong."""
    fields = read_body(EmbedFields, raw, texts.unknown)
    fields.refuse_unsupported()
    if (fields.input is None) == (fields.prompt is None):
        raise RequestError.bad_field("input", "Send either input or prompt.")
    given, param = (fields.prompt, "prompt") if fields.input is None else (fields.input, "input")
    return Call(
        prompts=texts.tokenized(given, param, reading=PromptReading(None if fields.truncate is False else -1)),
        models=(ModelNames.of(fields.model and base_of(fields.model), None),),
        samplings=(SamplingParams(max_new_tokens=1, temperature=0.0),),
        pooling="last",
        has_output=False,
        ignored=texts.unknown.ignored,
    )
