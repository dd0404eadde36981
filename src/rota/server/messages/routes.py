"""POST /v1/messages continues a conversation, in Anthropic's shape."""

from __future__ import annotations

from fastapi import Request as HttpRequest
from fastapi import Response

from rota.server.access.access import Right
from rota.server.answers.respond import respond
from rota.server.context import AppContext
from rota.server.messages.call import MessagesFields, PromptFields, read_count, read_messages
from rota.server.messages.writer import MessageBody, MessageEventBody, MessagesWriter, TokenCountBody, messages_error
from rota.server.openai.tokenize_routes import answer_at_once
from rota.server.route import post

ERRORS = {"/v1/messages": messages_error}


async def messages(context: AppContext, http: HttpRequest) -> Response:
    """Continue a conversation, in Anthropic's shape; errors are in that shape too."""
    return await respond(context, http, read_messages, MessagesWriter, "msg_")


async def count_tokens(context: AppContext, http: HttpRequest) -> Response:
    """The number of tokens of a conversation, in Anthropic's shape."""
    return await answer_at_once(context, http, read_count)


ROUTES = (
    post("/v1/messages", Right.MODEL, messages, MessagesFields, MessageBody, MessageEventBody),
    post("/v1/messages/count_tokens", Right.MODEL, count_tokens, PromptFields, TokenCountBody),
)
