"""A body of /v1/responses is checked and becomes a chat's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rota.core.errors import RequestError
from rota.server.fields import read_body
from rota.server.openai.chat_fields import ChatCall
from rota.server.prompts import Texts
from rota.server.reading import AskedModels
from rota.server.responses.conversation import Conversation
from rota.server.responses.fields import ResponsesFields, TextFormat
from rota.server.responses.tools import chat_choice, chat_tools
from rota.server.sampling import CommonSampling
from rota.server.translation import Translation

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


@dataclass(frozen=True, slots=True)
class ResponsesCall:
    """What the route needs of a body. `echoed` is what the answer repeats of it."""

    chat: ChatCall
    echoed: dict[str, Any]

    @property
    def asked_models(self) -> AskedModels:
        return self.chat.asked_models


def read_responses(texts: Texts, raw: bytes) -> ResponsesCall:
    """Read a body. Raises RequestError for the first field that is wrong."""
    fields = read_body(ResponsesFields, raw)
    _refuse_unsupported(fields)
    return ResponsesCall(_translated(fields).read(texts), _echoed(fields))


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
    conversation = Conversation(fields.instructions, fields.input)
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
