"""A body of /v1/messages is checked and becomes a chat's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from rota.core.errors import RequestError
from rota.server.fields import read_body
from rota.server.messages.conversation import Conversation
from rota.server.messages.fields import CustomTool, MessagesFields, MessagesToolChoice, PromptFields
from rota.server.openai.chat_fields import ChatCall
from rota.server.openai.tokenize_fields import TextAnswer
from rota.server.prompts import TextLimits, Texts
from rota.server.translation import Translation

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
    fields = read_body(MessagesFields, raw)
    body: dict[str, Any] = {name: value for name in _SAME_NAMES if (value := getattr(fields, name)) is not None}
    if fields.stop_sequences:
        body["stop"] = fields.stop_sequences
    if fields.metadata and fields.metadata.user_id:
        body["user"] = fields.metadata.user_id
    return _translated(fields, body).read(texts)


def read_count(texts: Texts, raw: bytes) -> TextAnswer:
    """Count the tokens of a prompt, also of one that does not fit: its client asks in order to make it shorter."""
    fields = read_body(PromptFields, raw)
    call = _translated(fields, {}).read(replace(texts, limits=TextLimits()))
    tokens = len(call.prompts.tokens[0])
    return TextAnswer(fields.model, tokens, msgspec.json.encode({"input_tokens": tokens}))


def _translated(fields: PromptFields, body: dict[str, Any]) -> Translation:
    fields.refuse_unsupported()
    conversation = Conversation(fields)
    body |= {"messages": conversation.messages} | ({"model": fields.model} if fields.model else {})
    if conversation.is_begun:
        body["continue_final_message"] = True
    if fields.tools:
        body["tools"] = [_function(tool, f"tools.{index}") for index, tool in enumerate(fields.tools)]
    if fields.tool_choice:
        body |= _chat_choice(fields.tool_choice)
    if template_kwargs := _template_kwargs(fields):
        body["chat_template_kwargs"] = template_kwargs
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


def _template_kwargs(fields: PromptFields) -> dict[str, Any]:
    """Templates of models that can think or not have a word for it, mostly this one."""
    thinks = {"enabled": True, "disabled": False}.get(fields.thinking.type if fields.thinking else "")
    return (fields.chat_template_kwargs or {}) | ({} if thinks is None else {"enable_thinking": thinks})
