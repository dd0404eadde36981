"""POST /v1/responses continues a conversation of items, in OpenAI's shape."""

from __future__ import annotations

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest

from rota.server.answers.respond import respond
from rota.server.docs import gives, takes
from rota.server.front import Front
from rota.server.openai.chat import parsed_chat
from rota.server.openai.sampling_fields import model_for
from rota.server.openai.writer import TokenNamer
from rota.server.responses.call import ResponsesFields, read_responses
from rota.server.responses.writer import ResponseBody, ResponseEventBody, ResponsesShape


def install_responses_route(app: FastAPI, front: Front) -> None:
    @app.post("/v1/responses", openapi_extra=takes(ResponsesFields), responses=gives(ResponseBody, ResponseEventBody))
    async def responses(http: HttpRequest) -> Response:
        """Continue a conversation of items. Nothing is stored, so every call sends the whole conversation."""
        call = front.identify(http)
        read = await front.read(call.key, http, read_responses)
        model = model_for(front, call, read.chat.names, read.chat.asks)
        answer_id = f"resp_{call.name}"
        parsed = parsed_chat(call, answer_id, model, read.chat, "input")
        shape = ResponsesShape(answer_id, model.adapter.name, read, TokenNamer(front.tokenizer.pieces))
        return await respond(front, http, parsed, shape, read.chat.is_streamed)
