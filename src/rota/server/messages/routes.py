"""POST /v1/messages continues a conversation, in Anthropic's shape."""

from __future__ import annotations

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest

from rota.server.answers.respond import respond
from rota.server.context import AppContext
from rota.server.docs import gives, takes
from rota.server.messages.call import MessagesFields, PromptFields, read_count, read_messages
from rota.server.messages.writer import MessageBody, MessageEventBody, MessagesWriter, TokenCountBody, messages_error
from rota.server.openai.tokenize_routes import answer_at_once

ERRORS = {"/v1/messages": messages_error}


def install(app: FastAPI, context: AppContext) -> None:
    @app.post("/v1/messages", openapi_extra=takes(MessagesFields), responses=gives(MessageBody, MessageEventBody))
    async def messages(http: HttpRequest) -> Response:
        """Continue a conversation, in Anthropic's shape; errors are in that shape too."""
        return await respond(context, http, read_messages, MessagesWriter, "msg_")

    @app.post("/v1/messages/count_tokens", openapi_extra=takes(PromptFields), responses=gives(TokenCountBody))
    async def count_tokens(http: HttpRequest) -> Response:
        """The number of tokens of a conversation, in Anthropic's shape."""
        return await answer_at_once(context, http, read_count)
