"""A body of /v1/responses is checked and becomes a chat's."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from rota.core.errors import RequestError
from rota.core.request import MAX_LOGPROBS, MAX_SEED
from rota.server.calls.fields import CacheSalt, Count, Fields, Unsupported, read_body, within
from rota.server.calls.prompts import Texts
from rota.server.calls.sampling import CommonSampling
from rota.server.openai.chat_fields import ChatCall
from rota.server.openai.translation import Translation

# ── items ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# The input of /v1/responses: messages, calls, their outputs and thoughts, as items of one list.

Status = Literal["in_progress", "completed", "incomplete"]


class TextPart(Fields):
    """A part of a message. Parts that are no text are refused by their type."""

    model_config = ConfigDict(extra="allow", strict=True, json_schema_extra={"required": ["type", "text"]})

    type: str = Field(json_schema_extra={"enum": ["input_text", "output_text", "reasoning_text", "summary_text"]})
    text: str | None = Field(default=None, json_schema_extra={"type": "string"})

    def read(self, where: str) -> str:
        if self.type not in ("input_text", "output_text", "reasoning_text", "summary_text", "text"):
            message = f"{where} is of type '{self.type[:100]}'; Rota reads text, in parts of type 'input_text'."
            raise RequestError.bad_field(f"{where}.type", message)
        if self.text is None:
            raise RequestError.bad_field(f"{where}.text", f"{where}.text is missing.")
        return self.text


Parts = Annotated[list[TextPart], Field(fail_fast=True)]


def text_of(content: str | list[TextPart], where: str) -> str:
    """All of it as one text, as a chat reads its parts."""
    if isinstance(content, str):
        return content
    return "\n".join([part.read(f"{where}.{index}") for index, part in enumerate(content)])


class MessageItem(Fields):
    """A message, also one that was an answer."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts
    # Notes of the service that made it. They change nothing.
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class CallItem(Fields):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None
    namespace: Unsupported = None
    caller: Unsupported = None


class OutputItem(Fields):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts
    name: str | None = None
    id: str | None = None
    status: Status | None = None
    namespace: Unsupported = None
    caller: Unsupported = None


class ReasoningItem(Fields):
    """What the model thought before it answered."""

    type: Literal["reasoning"]
    summary: Parts | None = None
    content: Parts | None = None
    id: str | None = None
    status: Status | None = None
    encrypted_content: Unsupported = None

    def text(self, where: str) -> str:
        self.refuse_unsupported(f"{where}.")
        name, parts = ("content", self.content) if self.content else ("summary", self.summary or [])
        return text_of(parts, f"{where}.{name}")


class OtherItem(Fields):
    """An item that is refused by its type."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str | None = None


_KINDS = {
    "message": "Message",
    "function_call": "Call",
    "function_call_output": "Output",
    "reasoning": "Reasoning",
}


def _kind(item: Any) -> str:
    # Capital letters: `fields` leaves the names of types out of the path of an error.
    if not isinstance(item, dict):
        return "Other"
    return _KINDS.get(str(item.get("type") or ("message" if "role" in item else "")), "Other")


Item = Annotated[
    Annotated[MessageItem, Tag("Message")]
    | Annotated[CallItem, Tag("Call")]
    | Annotated[OutputItem, Tag("Output")]
    | Annotated[ReasoningItem, Tag("Reasoning")]
    | Annotated[OtherItem, Tag("Other")],
    Discriminator(_kind),
]
Items = Annotated[list[Item], Field(fail_fast=True)]


def refused(item: OtherItem, where: str) -> RequestError:
    """The error for an item of another type."""
    kind = f"of type '{item.type[:100]}'" if item.type else "without a type"
    message = f"{where} is an item {kind}; Rota reads messages, function_call, function_call_output and reasoning."
    return RequestError.bad_field(f"{where}.type", message)


# ── fields ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class TextFormat(Fields):
    """What the answer's text must look like."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    # A field of this name would hide a method of its class.
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None
    description: str | None = None


class TextFields(Fields):
    format: TextFormat | None = None


class ReasoningFields(Fields):
    """How much the model thinks. Its thoughts come whole, never as a summary."""

    effort: str | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class ResponsesTool(Fields):
    """A function that the model may call. Tools of other types are refused by their type."""

    model_config = ConfigDict(extra="allow", strict=True, json_schema_extra={"required": ["type", "name"]})

    type: str = Field(json_schema_extra={"const": "function"})
    name: str | None = Field(default=None, json_schema_extra={"type": "string"})
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesToolChoice(Fields):
    """One function, or some of them."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str = Field(json_schema_extra={"enum": ["function", "allowed_tools"]})
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None


class ResponsesStreamOptions(Fields):
    # Padding that hides the length of tokens from who listens on the line. There is none, and it changes no text.
    include_obfuscation: bool | None = None


class ResponsesFields(CommonSampling):
    """A conversation to be continued, as items. Nothing is stored, whatever `store` says."""

    model: str | None = None
    lora_path: str | None = None
    input: str | Items
    instructions: str | None = None
    tools: Annotated[list[ResponsesTool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextFields | None = None
    reasoning: ReasoningFields | None = None
    max_output_tokens: Count | None = within(1)
    n: Literal[1] | None = None
    top_logprobs: Count | None = within(0, MAX_LOGPROBS)
    seed: int | None = within(0, MAX_SEED)
    cache_salt: CacheSalt | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    include: Annotated[list[str], Field(fail_fast=True)] | None = None
    # Who asks: the first of them counts.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Notes. They change nothing about the answer.
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    prompt_cache_retention: str | None = None
    # A limit of calls to built-in tools, of which there are none.
    max_tool_calls: Count | None = None
    # Only values that ask for the default behaviour.
    truncation: Literal["disabled", "auto"] | None = Field(default=None, json_schema_extra={"enum": ["disabled", None]})
    background: bool | None = Field(default=None, json_schema_extra={"enum": [False, None]})
    previous_response_id: Unsupported = None
    conversation: Unsupported = None
    prompt: Unsupported = None
    context_management: Unsupported = None
    moderation: Unsupported = None


# ── tools ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# The tools of /v1/responses become those of a chat: one level deeper.


def chat_tools(tools: list[ResponsesTool]) -> list[dict[str, Any]]:
    """The functions as a chat has them. Raises RequestError for another tool."""
    return [_function(tool, f"tools.{index}") for index, tool in enumerate(tools)]


def chat_choice(choice: str | ResponsesToolChoice) -> str | dict[str, Any]:
    """The choice as a chat has it."""
    if isinstance(choice, str):
        return choice
    if choice.type == "allowed_tools":
        allowed = [{"type": tool.get("type"), "function": {"name": tool.get("name")}} for tool in choice.tools or ()]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode or "auto", "tools": allowed}}
    if choice.type != "function":
        message = f"tool_choice is of type '{choice.type[:100]}'; Rota calls functions: use 'function'."
        raise RequestError.bad_field("tool_choice.type", message)
    return {"type": "function", "function": {"name": choice.name}}


def _function(tool: ResponsesTool, where: str) -> dict[str, Any]:
    if tool.type != "function":
        message = (
            f"{where} is the built-in tool '{tool.type[:100]}'; Rota has none: it calls functions that the client runs."
        )
        raise RequestError.bad_field(f"{where}.type", message)
    if tool.model_extra:
        name = next(iter(tool.model_extra))[:100]
        raise RequestError.bad_field(f"{where}.{name}", f"'{where}.{name}' is not a field of a function.")
    if tool.name is None:
        raise RequestError.bad_field(f"{where}.name", f"{where}.name is missing.")
    return {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})}


# ── conversation ────────────────────────────────────────────────────────────────────────────────────────────────────
# The items of /v1/responses become the messages of a chat.

GivenItems = list[MessageItem | CallItem | OutputItem | ReasoningItem | OtherItem]


class ItemsConversation:
    """Messages, and for each the place of its first item. Thoughts and calls of one turn are one message."""

    def __init__(self, instructions: str | None, given: str | GivenItems) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: dict[str, str] = {"messages": "input"}
        if instructions:
            self._add({"role": "system", "content": instructions}, "instructions")
        if isinstance(given, str):
            self._add({"role": "user", "content": given}, "input")
            return
        if not given:
            raise RequestError.bad_field("input", "input is an empty list; send a text or at least one item.")
        for index, item in enumerate(given):
            self._take(item, f"input.{index}")
        for message in self.messages:
            if message["content"] is None and "tool_calls" not in message:
                message["content"] = ""  # thoughts without an answer

    def _take(self, item: MessageItem | CallItem | OutputItem | ReasoningItem | OtherItem, where: str) -> None:
        match item:
            case MessageItem():
                self._message(item, where)
            case CallItem():
                item.refuse_unsupported(f"{where}.")
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                calls = self._turn(where).setdefault("tool_calls", [])
                self.places[f"messages.{len(self.messages) - 1}.tool_calls.{len(calls)}.function"] = where
                calls.append(call)
            case OutputItem():
                item.refuse_unsupported(f"{where}.")
                content = text_of(item.output, f"{where}.output")
                self.places[f"messages.{len(self.messages)}.tool_call_id"] = f"{where}.call_id"
                self._add({"role": "tool", "tool_call_id": item.call_id, "content": content}, where)
            case ReasoningItem():
                if text := item.text(where):
                    self._add({"role": "assistant", "content": None, "reasoning_content": text}, where)
            case OtherItem():
                raise refused(item, where)

    def _message(self, item: MessageItem, where: str) -> None:
        content = text_of(item.content, f"{where}.content")
        if item.role == "assistant" and self._is_open_turn and self.messages[-1]["content"] is None:
            self.messages[-1]["content"] = content
        else:
            self._add({"role": item.role, "content": content}, where)

    @property
    def _is_open_turn(self) -> bool:
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"

    def _turn(self, where: str) -> dict[str, Any]:
        """The message of the model's turn that goes on, or a new one."""
        if not self._is_open_turn:
            self._add({"role": "assistant", "content": None}, where)
        return self.messages[-1]

    def _add(self, message: dict[str, Any], where: str) -> None:
        self.places[f"messages.{len(self.messages)}"] = where
        self.messages.append(message)


_LOGPROBS = "message.output_text.logprobs"
# Thoughts are given in clear, and a client that keeps them can send them back.
_INCLUDABLE = (_LOGPROBS, "reasoning.encrypted_content")
_SAME_NAMES = (
    *CommonSampling.model_fields,
    "model",
    "lora_path",
    "parallel_tool_calls",
    "seed",
    "cache_salt",
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "chat_template_kwargs",
    "stream",
)
_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "tool_choice.function": "tool_choice",
    "tool_choice.allowed_tools": "tool_choice",
}
_STORED = {
    "previous_response_id": "send the earlier items in input",
    "conversation": "send the earlier items in input",
    "prompt": "send its text in instructions or input",
    "background": "leave it out, and wait for the answer or stream it",
}


def read_responses(texts: Texts, raw: bytes) -> ChatCall:
    """Read a body. Raises RequestError for the first field that is wrong."""
    fields = read_body(ResponsesFields, raw, texts.unknown)
    _refuse_unsupported(fields)
    return replace(_translated(fields).read(texts), echoed=_echoed(fields), counts_thoughts=True)


def _refuse_unsupported(fields: ResponsesFields) -> None:
    for name, advice in _STORED.items():
        if getattr(fields, name):
            raise RequestError.bad_field(name, f"{name} needs a store, and no store is configured here; {advice}.")
    fields.refuse_unsupported()
    if fields.truncation == "auto":
        message = "truncation 'auto' is not supported: what does not fit the context is refused; leave it out."
        raise RequestError.bad_field("truncation", message)
    for index, name in enumerate(fields.include or ()):
        if name not in _INCLUDABLE:
            message = f"include.{index}: '{name[:100]}' is not supported; known are {' and '.join(_INCLUDABLE)}."
            raise RequestError.bad_field(f"include.{index}", message)


def _translated(fields: ResponsesFields) -> Translation:
    conversation = ItemsConversation(fields.instructions, fields.input)
    body = {name: value for name in _SAME_NAMES if (value := getattr(fields, name)) is not None}
    body["messages"] = conversation.messages
    if fields.tools:
        body["tools"] = chat_tools(fields.tools)
    if fields.tool_choice is not None:
        body["tool_choice"] = chat_choice(fields.tool_choice)
    if fields.max_output_tokens is not None:
        body["max_completion_tokens"] = fields.max_output_tokens
    if fields.reasoning and fields.reasoning.effort is not None:
        body["reasoning_effort"] = fields.reasoning.effort
    if fields.text and fields.text.format:
        body["response_format"] = _response_format(fields.text.format)
    if fields.top_logprobs or _LOGPROBS in (fields.include or ()):
        body |= {"logprobs": True, "top_logprobs": fields.top_logprobs or 0}
    places = {f"tools.{index}.function": f"tools.{index}" for index in range(len(fields.tools or ()))}
    return Translation(body, {**_NAMES, **conversation.places, **places})


def _response_format(wanted: TextFormat) -> dict[str, Any]:
    given = wanted.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
    if wanted.type == "json_schema":
        return {"type": "json_schema", "json_schema": given}
    if given:
        raise RequestError.bad_field("text.format", f"text.format of type '{wanted.type}' has no other fields.")
    return {"type": wanted.type}


def _echoed(fields: ResponsesFields) -> dict[str, Any]:
    """The fields that an answer repeats, with the values that were left out. Nothing is ever stored."""
    wanted = fields.text.format if fields.text else None
    given = fields.model_dump(by_alias=True, include={"tools", "tool_choice", "reasoning"})
    return {
        "background": False,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": fields.max_tool_calls,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": given["reasoning"] or {"effort": None, "summary": None},
        "safety_identifier": fields.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if fields.temperature is None else fields.temperature,
        "text": {"format": wanted.model_dump(by_alias=True, exclude_none=True) if wanted else {"type": "text"}},
        "tool_choice": given["tool_choice"] or "auto",
        "tools": given["tools"] or [],
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": 1.0 if fields.top_p is None else fields.top_p,
        "truncation": "disabled",
        "user": fields.user,
    }
