"""POST /v1/responses continues a conversation of items, in OpenAI's shape."""

from __future__ import annotations

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest

from rota.server.answers.respond import respond
from rota.server.context import AppContext
from rota.server.docs import gives, takes
from rota.server.openai.chat import parsed_chat
from rota.server.openai.sampling_fields import model_for
from rota.server.openai.writer import TokenNamer
from rota.server.responses.call import ResponsesFields, read_responses
from rota.server.responses.writer import ResponseBody, ResponseEventBody, ResponsesWriter


def install(app: FastAPI, context: AppContext) -> None:
    @app.post("/v1/responses", openapi_extra=takes(ResponsesFields), responses=gives(ResponseBody, ResponseEventBody))
    async def responses(http: HttpRequest) -> Response:
        """Continue a conversation of items. Nothing is stored, so every call sends the whole conversation."""
        call = context.identify(http)
        read = await context.read(call.key, http, read_responses)
        model = model_for(context, call, read.chat.names, read.chat.call_options)
        answer_id = f"resp_{call.name}"
        parsed = parsed_chat(call, answer_id, model, read.chat, "input")
        writer = ResponsesWriter(answer_id, model.adapter.name, read, TokenNamer(context.tokenizer.pieces))
        return await respond(context, http, parsed, writer, read.chat.is_streamed)
