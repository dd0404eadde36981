"""A body of /v1/messages is checked and becomes a chat's."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal, NoReturn

import msgspec
from pydantic import ConfigDict, Discriminator, Field, Tag

from rota.core.errors import RequestError
from rota.core.request import MAX_SEED
from rota.server.calls.fields import CacheSalt, Count, Fields, Unsupported, read_body, unless, within
from rota.server.calls.prompts import TextLimits, Texts
from rota.server.calls.sampling import Stop
from rota.server.openai.chat_fields import ChatCall
from rota.server.openai.tokenize_routes import TextAnswer
from rota.server.openai.tools import ThinkingFields
from rota.server.openai.translation import Translation

# ── content ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# The content of a message in Anthropic's shape: blocks of text, calls, their results and thoughts.


class TextBlock(Fields):
    type: Literal["text"]
    text: str
    # Prompts are cached without a mark.
    cache_control: dict[str, Any] | None = None
    citations: Unsupported = None

    def read(self, where: str) -> str:
        self.refuse_unsupported(f"{where}.")
        return self.text


class ToolUseBlock(Fields):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: dict[str, Any] | None = None
    # Who calls: the model, in every answer of Rota.
    caller: dict[str, Any] | None = None


class ThinkingBlock(Fields):
    """What the model thought. Rota's own have an empty signature."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class OtherBlock(Fields):
    """A block that is refused by its type."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str | None = None

    def read(self, where: str) -> NoReturn:
        kind = f"of type '{self.type[:100]}'" if self.type else "without a type"
        message = f"{where} is a block {kind}; Rota reads text, tool_use, tool_result and thinking."
        raise RequestError.bad_field(f"{where}.type", message)


def _kind(block: Any) -> str:
    # Capital letters: `fields` leaves the names of types out of the path of an error.
    kinds = {"text": "Text", "tool_use": "Use", "tool_result": "Result", "thinking": "Thinking"}
    return kinds.get(str(block.get("type")), "Other") if isinstance(block, dict) else "Other"


def _text_kind(block: Any) -> str:
    return "Text" if _kind(block) == "Text" else "Other"


OnlyText = Annotated[Annotated[TextBlock, Tag("Text")] | Annotated[OtherBlock, Tag("Other")], Discriminator(_text_kind)]
TextBlocks = Annotated[list[OnlyText], Field(fail_fast=True)]


class ToolResultBlock(Fields):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | TextBlocks | None = None
    is_error: bool | None = None
    cache_control: dict[str, Any] | None = None

    def text(self, where: str) -> str:
        """Chat templates have no word for a failure, so the text says it."""
        text = text_of(self.content or "", f"{where}.content")
        return f"Error: {text}" if self.is_error else text


Block = Annotated[
    Annotated[TextBlock, Tag("Text")]
    | Annotated[ToolUseBlock, Tag("Use")]
    | Annotated[ToolResultBlock, Tag("Result")]
    | Annotated[ThinkingBlock, Tag("Thinking")]
    | Annotated[OtherBlock, Tag("Other")],
    Discriminator(_kind),
]
Content = Annotated[list[Block], Field(fail_fast=True)]


def text_of(content: str | list[TextBlock | OtherBlock], where: str) -> str:
    """All of it as one text, as a chat reads its parts. Raises RequestError for a block that is no text."""
    if isinstance(content, str):
        return content
    return "\n".join([block.read(f"{where}.{index}") for index, block in enumerate(content)])


# ── fields ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# The bodies of /v1/messages and /v1/messages/count_tokens.

_KEEP_THOUGHTS = {"type": "clear_thinking_20251015", "keep": "all"}


class MessageFields(Fields):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Content


class CustomTool(Fields):
    """A function that the model may call. Tools of other types are refused by their type."""

    model_config = ConfigDict(extra="allow", strict=True, json_schema_extra={"required": ["name", "input_schema"]})

    name: str
    type: str | None = Field(default=None, json_schema_extra={"enum": ["custom", None]})
    description: str | None = None
    input_schema: dict[str, Any] | None = Field(default=None, json_schema_extra={"type": "object"})
    strict: bool | None = None
    # Notes for Anthropic's own service: prompts are cached here without a mark, and arguments are streamed at once.
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None


class MessagesToolChoice(Fields):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Fields):
    type: Literal["json_schema"]
    # A field of this name would hide a method of its class.
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Fields):
    effort: str | None = None
    format: OutputFormat | None = None


class MessagesMetadata(Fields):
    user_id: str | None = None


class PromptFields(Fields):
    """What the model reads."""

    model: str | None = None
    messages: Annotated[list[MessageFields], Field(fail_fast=True, min_length=1)]
    system: str | TextBlocks | None = None
    tools: Annotated[list[CustomTool], Field(fail_fast=True)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingFields | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    # Prompts are cached without a mark.
    cache_control: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mcp_servers: Unsupported = None
    # What agent programs send: the thoughts of all turns are kept, and they always are.
    context_management: Unsupported = unless({"edits": []}, {"edits": [_KEEP_THOUGHTS]})


class MessagesFields(PromptFields):
    """A conversation to be continued, in Anthropic's shape."""

    lora_path: str | None = None
    max_tokens: Count = Field(json_schema_extra={"minimum": 1})
    stream: bool | None = None
    temperature: float | None = within(0.0, 100.0)
    top_p: float | None = within(0.001, 1.0)
    top_k: Count | None = within(-1)
    stop_sequences: Annotated[list[Stop], Field(fail_fast=True)] | None = None
    seed: int | None = within(0, MAX_SEED)
    cache_salt: CacheSalt | None = None
    # Who asks.
    metadata: MessagesMetadata | None = None
    # Only values that ask for the default behaviour.
    speed: Literal["standard"] | None = None
    container: Unsupported = None
    inference_geo: Unsupported = None


# ── conversation ────────────────────────────────────────────────────────────────────────────────────────────────────
# Messages in Anthropic's shape become the messages of a chat.


class MessagesConversation:
    """Messages, and for each the client's message that it comes from. A result of a call is a message of its own."""

    def __init__(self, fields: PromptFields) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: dict[str, str] = {}
        if fields.system:
            self._add({"role": "system", "content": text_of(fields.system, "system")}, "system")
        for index, message in enumerate(fields.messages):
            where = f"messages.{index}"
            if not message.content:
                content = f"{where}.content"
                raise RequestError.bad_field(content, f"{content} is empty; send a text or at least one block.")
            if isinstance(message.content, str):
                self._add({"role": message.role, "content": message.content}, where)
            elif message.role == "assistant":
                self._turn(message, where)
            else:
                self._user(message, where)

    @property
    def is_begun(self) -> bool:
        """Whether the last message is the beginning of the answer, as in Anthropic's own service."""
        last = self.messages[-1]
        return last["role"] == "assistant" and "tool_calls" not in last

    def _user(self, message: MessageFields, where: str) -> None:
        texts: list[str] = []
        for index, block in enumerate(message.content):
            place = f"{where}.content.{index}"
            match block:
                case TextBlock() | OtherBlock():
                    texts.append(block.read(place))
                case ToolResultBlock():
                    texts = self._flush(message.role, texts, where)
                    self.places[f"messages.{len(self.messages)}.tool_call_id"] = f"{place}.tool_use_id"
                    result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.text(place)}
                    self._add(result, place)
                case _:
                    raise _misplaced(block, place, message.role)
        self._flush(message.role, texts, where)

    def _turn(self, message: MessageFields, where: str) -> None:
        """The model's turn: thoughts, text and calls are one message."""
        texts: list[str] = []
        calls: list[dict[str, Any]] = []
        thoughts: list[str] = []
        for index, block in enumerate(message.content):
            place = f"{where}.content.{index}"
            match block:
                case TextBlock() | OtherBlock():
                    texts.append(block.read(place))
                case ToolUseBlock():
                    self.places[f"messages.{len(self.messages)}.tool_calls.{len(calls)}.function"] = place
                    calls.append(_call(block))
                case ThinkingBlock():
                    thoughts.append(block.thinking)
                case _:
                    raise _misplaced(block, place, message.role)
        turn: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts) or (None if calls else "")}
        turn |= {"tool_calls": calls} if calls else {}
        self._add(turn | ({"reasoning_content": "\n".join(thoughts)} if any(thoughts) else {}), where)

    def _flush(self, role: str, texts: list[str], where: str) -> list[str]:
        if texts:
            self._add({"role": role, "content": "\n".join(texts)}, where)
        return []

    def _add(self, message: dict[str, Any], where: str) -> None:
        self.places[f"messages.{len(self.messages)}"] = where
        self.messages.append(message)


def _call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": msgspec.json.encode(block.input).decode()}
    return {"id": block.id, "type": "function", "function": function}


def _misplaced(block: Any, where: str, role: str) -> RequestError:
    message = f"{where} is of type '{block.type}', which a message of role '{role}' cannot hold."
    return RequestError.bad_field(f"{where}.type", message)


_SAME_NAMES = ("lora_path", "max_tokens", "stream", "temperature", "top_p", "top_k", "seed", "cache_salt")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_NAMES = {
    "user": "metadata.user_id",
    "stop": "stop_sequences",
    "continue_final_message": "messages",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "tool_choice.function": "tool_choice",
}


def read_messages(texts: Texts, raw: bytes) -> ChatCall:
    """Read a body. Raises RequestError for the first field that is wrong."""
    fields = read_body(MessagesFields, raw, texts.unknown)
    body: dict[str, Any] = {name: value for name in _SAME_NAMES if (value := getattr(fields, name)) is not None}
    if fields.stop_sequences:
        body["stop"] = fields.stop_sequences
    if fields.metadata and fields.metadata.user_id:
        body["user"] = fields.metadata.user_id
    return _translated(fields, body).read(texts)


def read_count(texts: Texts, raw: bytes) -> TextAnswer:
    """Count the tokens of a prompt, also of one that does not fit: its client asks in order to make it shorter."""
    fields = read_body(PromptFields, raw, texts.unknown)
    call = _translated(fields, {}).read(replace(texts, limits=TextLimits()))
    tokens = len(call.prompts.tokens[0])
    return TextAnswer(fields.model, tokens, msgspec.json.encode({"input_tokens": tokens}))


def _translated(fields: PromptFields, body: dict[str, Any]) -> Translation:
    fields.refuse_unsupported()
    conversation = MessagesConversation(fields)
    body |= {"messages": conversation.messages} | ({"model": fields.model} if fields.model else {})
    if conversation.is_begun:
        body["continue_final_message"] = True
    if fields.tools:
        body["tools"] = [_function(tool, f"tools.{index}") for index, tool in enumerate(fields.tools)]
    if fields.tool_choice:
        body |= _chat_choice(fields.tool_choice)
    body |= fields.model_dump(include={"thinking", "chat_template_kwargs"}, exclude_none=True)
    config = fields.output_config
    if config and config.effort is not None:
        body["reasoning_effort"] = config.effort
    if wanted := (config and config.format) or fields.output_format:
        schema = {"name": "answer", "strict": True, "schema": wanted.schema_}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    places = {f"tools.{index}.function": f"tools.{index}" for index in range(len(fields.tools or ()))}
    places |= {f"{place}.parameters": f"{name}.input_schema" for place, name in places.items()}
    return Translation(body, {**_NAMES, **conversation.places, **places})


def _function(tool: CustomTool, where: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        message = (
            f"{where} is the built-in tool '{tool.type[:100]}'; Rota has none: it calls tools that have an "
            "input_schema, and the client runs them."
        )
        raise RequestError.bad_field(f"{where}.type", message)
    if tool.model_extra:
        name = next(iter(tool.model_extra))[:100]
        raise RequestError.bad_field(f"{where}.{name}", f"'{where}.{name}' is not a field of a tool.")
    if tool.input_schema is None:
        raise RequestError.bad_field(f"{where}.input_schema", f"{where}.input_schema is missing.")
    given = tool.model_dump(exclude_none=True, include={"name", "description", "strict"})
    return {"type": "function", "function": {**given, "parameters": tool.input_schema}}


def _chat_choice(choice: MessagesToolChoice) -> dict[str, Any]:
    if (choice.type == "tool") != (choice.name is not None):
        message = "tool_choice.name names a tool for type 'tool', and for no other."
        raise RequestError.bad_field("tool_choice.name", message)
    wanted: Any = _CHOICES.get(choice.type) or {"type": "function", "function": {"name": choice.name}}
    alone = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    return {"tool_choice": wanted, **alone}
