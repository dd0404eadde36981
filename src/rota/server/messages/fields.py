"""The bodies of /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from rota.core.request import MAX_SEED
from rota.server.fields import CacheSalt, Count, Fields, Unsupported, unless, within
from rota.server.messages.content import Content, TextBlocks
from rota.server.sampling import Stop

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


class Thinking(Fields):
    """Whether the model thinks. `budget_tokens` is no limit here: thoughts count as output, within `max_tokens`."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = within(1)
    display: Literal["summarized"] | None = None


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
    thinking: Thinking | None = None
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
    service_tier: Literal["auto", "standard_only"] | None = None
    speed: Literal["standard"] | None = None
    container: Unsupported = None
    inference_geo: Unsupported = None
