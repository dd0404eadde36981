"""Routes turn text into tokens and back, in vLLM's shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import Request as HttpRequest
from fastapi import Response
from pydantic import BaseModel

from rota.core.errors import RequestError
from rota.server.calls.call import AskedModels
from rota.server.calls.fields import Fields, Unsupported, read_body
from rota.server.calls.prompts import Texts, TokenList, Tokens, checked_tokens
from rota.server.calls.reading_room import Work
from rota.server.context import AppContext
from rota.server.openai.chat_fields import Messages, PromptEnding, conversation, template_variables
from rota.server.openai.tools import ToolFields, Tools, tool_use

# ── tokenize fields ─────────────────────────────────────────────────────────────────────────────────────────────────
# The bodies of /tokenize and /detokenize are read and answered at once, because nothing else is needed for that.


class TokenizeFields(PromptEnding):
    """A text, or a conversation, to be turned into tokens."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    chat_template: Unsupported = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeFields(Fields):
    """Tokens to be turned into text. Special tokens have no text."""

    model: str | None = None
    tokens: TokenList


@dataclass(frozen=True, slots=True)
class TokenizeBody:
    """The tokens of a text."""

    tokens: Tokens
    count: int
    max_model_len: int | None
    token_strs: list[str] | None


@dataclass(frozen=True, slots=True)
class DetokenizeBody:
    """The text of tokens."""

    prompt: str


class TokenizerInfoBody(BaseModel):
    """The settings of a tokenizer. Which there are beside these, the model's folder says."""

    tokenizer_class: str | None
    chat_template: str | None


@dataclass(frozen=True, slots=True)
class TextAnswer:
    """An answer as JSON. The route still has to check the model's name, and may charge the tokens."""

    model: str | None
    tokens: int
    body: bytes

    @property
    def asked_models(self) -> AskedModels:
        return (("model", self.model),)


def read_tokenize(texts: Texts, raw: bytes) -> TextAnswer:
    """Read a body and answer it. Raises RequestError for the first field that is wrong."""
    fields = read_body(TokenizeFields, raw)
    fields.refuse_unsupported()
    tokens = _tokens_of(texts, fields)
    pieces = texts.tokenizer.pieces
    token_strs = [pieces.name_of(token) for token in tokens] if fields.return_token_strs else None
    answer = TokenizeBody(tokens, len(tokens), texts.limits.max_sequence_tokens, token_strs)
    return TextAnswer(fields.model, len(tokens), msgspec.json.encode(answer))


def read_detokenize(texts: Texts, raw: bytes) -> TextAnswer:
    """Read a body and answer it. Raises RequestError for the first field that is wrong."""
    fields = read_body(DetokenizeFields, raw)
    tokens = checked_tokens(texts.tokenizer, fields.tokens, "tokens")
    return TextAnswer(fields.model, len(tokens), msgspec.json.encode(DetokenizeBody(texts.tokenizer.decode(tokens))))


def _tokens_of(texts: Texts, fields: TokenizeFields) -> Tokens:
    if (fields.prompt is None) == (fields.messages is None):
        raise RequestError.bad_field("prompt", "Send either prompt or messages.")
    if fields.prompt is not None:
        for name in ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs"):
            if getattr(fields, name) not in (None, False):  # a list or an object may be empty
                raise RequestError.bad_field(name, f"{name} is for messages only.")
        texts.refuse_too_long(len(fields.prompt), "prompt")
        return texts.tokenizer.encode(fields.prompt, fields.add_special_tokens is not False)
    if fields.add_special_tokens:
        message = "add_special_tokens must not be true for messages: the chat template writes its own."
        raise RequestError.bad_field("add_special_tokens", message)
    asked = ToolFields(tools=fields.tools, chat_template_kwargs=fields.chat_template_kwargs)
    return texts.rendered(
        conversation(fields.messages or []),
        fields.has_generation_prompt(),
        fields.is_continued(),
        tools=tool_use(asked).shown or None,
        variables=template_variables(texts, asked),
    )


async def tokenize(context: AppContext, http: HttpRequest) -> Response:
    """The tokens of a text or a conversation, as the model reads them."""
    return await answer_at_once(context, http, read_tokenize)


async def detokenize(context: AppContext, http: HttpRequest) -> Response:
    """The text of tokens."""
    return await answer_at_once(context, http, read_detokenize)


async def tokenizer_info(context: AppContext) -> Response:
    """What the model's folder says of its tokenizer, with the chat template, in vLLM's shape."""
    tokenizer = context.tokenizer
    told = {"tokenizer_class": None, **tokenizer.settings, "chat_template": tokenizer.chat.default}
    return Response(msgspec.json.encode(told), media_type="application/json")


async def answer_at_once(context: AppContext, http: HttpRequest, work: Work[TextAnswer]) -> Response:
    """Answer a body that needs no engine."""
    key = context.enter(http)
    answer = await context.read(key, http, work)
    context.access.find(key, answer.model)
    context.access.admission.charge(key, answer.tokens)
    return Response(answer.body, media_type="application/json")
