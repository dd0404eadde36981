"""POST /v1/responses continues a conversation of items, in OpenAI's shape."""

from __future__ import annotations

from fastapi import Request as HttpRequest
from fastapi import Response

from rota.server.access.access import Right
from rota.server.answers.respond import respond
from rota.server.context import AppContext
from rota.server.responses.call import ResponsesFields, read_responses
from rota.server.responses.writer import ResponseBody, ResponseEventBody, ResponsesWriter
from rota.server.route import post


async def responses(context: AppContext, http: HttpRequest) -> Response:
    """Continue a conversation of items. Nothing is stored, so every call sends the whole conversation."""
    return await respond(context, http, read_responses, ResponsesWriter, "resp_")


ROUTES = (post("/v1/responses", Right.MODEL, responses, ResponsesFields, ResponseBody, ResponseEventBody),)
