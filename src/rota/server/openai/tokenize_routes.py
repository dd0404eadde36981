"""Routes turn text into tokens and back, in vLLM's shape."""

from __future__ import annotations

import msgspec
from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest

from rota.server.front import Front
from rota.server.openai.bodies import DetokenizeBody, TokenizeBody, TokenizerInfoBody
from rota.server.openai.tokenize_fields import (
    DetokenizeFields,
    TextAnswer,
    TokenizeFields,
    read_detokenize,
    read_tokenize,
)
from rota.server.openapi import gives, takes
from rota.server.reading import Work


def install_tokenize_routes(app: FastAPI, front: Front) -> None:
    @app.post("/v1/tokenize", openapi_extra=takes(TokenizeFields), responses=gives(TokenizeBody))
    @app.post("/tokenize", include_in_schema=False)
    async def tokenize(http: HttpRequest) -> Response:
        """The tokens of a text or a conversation, as the model reads them."""
        return await answer_at_once(front, http, read_tokenize)

    @app.post("/v1/detokenize", openapi_extra=takes(DetokenizeFields), responses=gives(DetokenizeBody))
    @app.post("/detokenize", include_in_schema=False)
    async def detokenize(http: HttpRequest) -> Response:
        """The text of tokens."""
        return await answer_at_once(front, http, read_detokenize)

    _install_tokenizer_info(app, front)


def _install_tokenizer_info(app: FastAPI, front: Front) -> None:
    @app.get("/tokenizer_info", responses=gives(TokenizerInfoBody))
    async def tokenizer_info(http: HttpRequest) -> Response:
        """What the model's folder says of its tokenizer, with the chat template, in vLLM's shape."""
        front.access.key_of(http)
        tokenizer = front.tokenizer
        told = {"tokenizer_class": None, **tokenizer.settings, "chat_template": tokenizer.chat_template}
        return Response(msgspec.json.encode(told), media_type="application/json")


async def answer_at_once(front: Front, http: HttpRequest, work: Work[TextAnswer]) -> Response:
    """Answer a body that needs no engine."""
    key = front.enter(http)
    answer = await front.read(key, http, work)
    front.access.find(key, answer.model)
    front.access.admission.charge(key, answer.tokens)
    return Response(answer.body, media_type="application/json")
