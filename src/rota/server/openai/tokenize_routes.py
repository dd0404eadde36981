"""Routes turn text into tokens and back, in vLLM's shape."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest

from rota.core.errors import RequestError
from rota.server.fields import Fields, Unsupported, read_body, refuse_unsupported_values
from rota.server.front import Front
from rota.server.openai.bodies import DetokenizeBody, TokenizeBody
from rota.server.openai.chat_fields import Messages, conversation
from rota.server.openapi import gives, takes
from rota.server.prompts import TokenList, Tokens, checked_tokens, encoded, in_thread_if_long, rendered


class TokenizeFields(Fields):
    """A text, or a conversation, to be turned into tokens."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    continue_final_message: Unsupported = None
    chat_template: Unsupported = None
    tools: Unsupported = None

    def refuse_unsupported(self) -> None:
        """Raises RequestError for values without support that would change the tokens."""
        refuse_unsupported_values(self, dict.fromkeys(("continue_final_message", "chat_template", "tools"), ()))


class DetokenizeFields(Fields):
    """Tokens to be turned into text. Special tokens have no text."""

    model: str | None = None
    tokens: TokenList


def install_tokenize_routes(app: FastAPI, front: Front) -> None:
    @app.post("/v1/tokenize", openapi_extra=takes(TokenizeFields), responses=gives(TokenizeBody))
    @app.post("/tokenize", include_in_schema=False)
    async def tokenize(http: HttpRequest) -> dict[str, Any]:
        """The tokens of a text or a conversation, as the model reads them."""
        key = front.enter(http)
        fields = read_body(TokenizeFields, await http.body())
        front.access.find(key, fields.model)
        fields.refuse_unsupported()
        tokens = await _tokens_of(front, fields)
        front.access.admission.charge(key, len(tokens))
        capacity = front.service.state.capacity
        pieces = front.tokenizer.pieces
        names = [pieces.name_of(token) for token in tokens] if fields.return_token_strs else None
        return {
            "tokens": tokens,
            "count": len(tokens),
            "max_model_len": capacity and capacity.max_sequence_tokens,
            "token_strs": names,
        }

    @app.post("/v1/detokenize", openapi_extra=takes(DetokenizeFields), responses=gives(DetokenizeBody))
    @app.post("/detokenize", include_in_schema=False)
    async def detokenize(http: HttpRequest) -> dict[str, Any]:
        """The text of tokens."""
        key = front.enter(http)
        fields = read_body(DetokenizeFields, await http.body())
        front.access.find(key, fields.model)
        tokens = checked_tokens(front.tokenizer, fields.tokens, "tokens")
        front.access.admission.charge(key, len(tokens))
        return {"prompt": await in_thread_if_long(len(tokens), lambda: front.tokenizer.decode(tokens))}


async def _tokens_of(front: Front, fields: TokenizeFields) -> Tokens:
    if (fields.prompt is None) == (fields.messages is None):
        raise RequestError.bad_field("prompt", "Send either prompt or messages.")
    if fields.prompt is not None:
        if fields.add_generation_prompt is not None:
            raise RequestError.bad_field("add_generation_prompt", "add_generation_prompt is for messages only.")
        return await encoded(front, fields.prompt, fields.add_special_tokens is not False)
    if fields.add_special_tokens:
        message = "add_special_tokens must not be true for messages: the chat template writes its own."
        raise RequestError.bad_field("add_special_tokens", message)
    return await rendered(front, conversation(fields.messages or []), fields.add_generation_prompt is not False)
