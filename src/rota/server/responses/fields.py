"""The body of /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from rota.core.request import MAX_LOGPROBS, MAX_SEED
from rota.server.fields import CacheSalt, Count, Fields, Unsupported, within
from rota.server.responses.items import Items
from rota.server.sampling import CommonSampling


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
    verbosity: Literal["medium"] | None = None


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


class ToolChoice(Fields):
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
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
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
    service_tier: Literal["auto", "default"] | None = None
    truncation: Literal["disabled", "auto"] | None = Field(default=None, json_schema_extra={"enum": ["disabled", None]})
    background: bool | None = Field(default=None, json_schema_extra={"enum": [False, None]})
    previous_response_id: Unsupported = None
    conversation: Unsupported = None
    prompt: Unsupported = None
    context_management: Unsupported = None
    moderation: Unsupported = None
