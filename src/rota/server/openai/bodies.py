"""The response bodies of OpenAI's routes, for /docs; the routes encode them by hand for speed."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from rota.server.rota_body import RotaBody


class CachedTokens(BaseModel):
    cached_tokens: int


class UsageBody(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class CompletionBody(BaseModel):
    """The continuations, or a part of them in a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | None = None
    rota: RotaBody | None = None


class FunctionCallBody(BaseModel):
    """A function and its arguments, as a text of JSON."""

    name: str
    arguments: str


class ToolCallBody(BaseModel):
    id: str
    type: Literal["function"]
    function: FunctionCallBody


class ChatMessageBody(BaseModel):
    """The content is null if the message only calls. Thoughts have two names, for different clients."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallBody] | None = None
    function_call: FunctionCallBody | None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessageBody
    logprobs: dict[str, Any] | None
    finish_reason: str
    token_ids: list[int] | None = None


class ChatBody(BaseModel):
    """The next message of a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    rota: RotaBody | None = None


class FunctionCallDelta(BaseModel):
    name: str | None = None
    arguments: str


class ToolCallDelta(BaseModel):
    """A piece of a call. Its first piece has id, type and name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCallDelta


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    function_call: FunctionCallDelta | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    token_ids: list[int] | None = None


class ChatChunkBody(BaseModel):
    """A part of the next message of a conversation."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | None = None
    prompt_token_ids: list[int] | None = None
    rota: RotaBody | None = None


class ModelBody(BaseModel):
    """A model that requests may name."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None


class ModelsBody(BaseModel):
    """The base model, then its adapters."""

    object: Literal["list"]
    data: list[ModelBody]


class TokenizeBody(BaseModel):
    """The tokens of a text."""

    tokens: list[int]
    count: int
    max_model_len: int | None
    token_strs: list[str] | None


class DetokenizeBody(BaseModel):
    """The text of tokens."""

    prompt: str


class TokenizerInfoBody(BaseModel):
    """The settings of a tokenizer. Which there are beside these, the model's folder says."""

    tokenizer_class: str | None
    chat_template: str | None
