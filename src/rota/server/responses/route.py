"""POST /v1/responses continues a conversation of items, in OpenAI's shape."""

from __future__ import annotations

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest

from rota.server.answers.respond import respond
from rota.server.context import AppContext
from rota.server.docs import gives, takes
from rota.server.responses.call import ResponsesFields, read_responses
from rota.server.responses.writer import ResponseBody, ResponseEventBody, ResponsesWriter


def install(app: FastAPI, context: AppContext) -> None:
    @app.post("/v1/responses", openapi_extra=takes(ResponsesFields), responses=gives(ResponseBody, ResponseEventBody))
    async def responses(http: HttpRequest) -> Response:
        """Continue a conversation of items. Nothing is stored, so every call sends the whole conversation."""
        return await respond(context, http, read_responses, ResponsesWriter, "resp_")
