"""POST /v1/messages continues a conversation, in Anthropic's shape."""

from __future__ import annotations

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest

from rota.server.answers.respond import respond
from rota.server.docs import gives, takes
from rota.server.front import Front
from rota.server.messages.call import MessagesFields, PromptFields, read_count, read_messages
from rota.server.messages.writer import MessageBody, MessageEventBody, MessagesShape, TokenCountBody
from rota.server.openai.chat import parsed_chat
from rota.server.openai.sampling_fields import model_for
from rota.server.openai.tokenize_routes import answer_at_once


def install_messages_routes(app: FastAPI, front: Front) -> None:
    @app.post("/v1/messages", openapi_extra=takes(MessagesFields), responses=gives(MessageBody, MessageEventBody))
    async def messages(http: HttpRequest) -> Response:
        """Continue a conversation, in Anthropic's shape; errors are in that shape too."""
        call = front.identify(http)
        read = await front.read(call.key, http, read_messages)
        model = model_for(front, call, read.names, read.asks)
        answer_id = f"msg_{call.name}"
        shape = MessagesShape(answer_id, model.adapter.name, read.speech)
        return await respond(front, http, parsed_chat(call, answer_id, model, read), shape, read.is_streamed)

    @app.post("/v1/messages/count_tokens", openapi_extra=takes(PromptFields), responses=gives(TokenCountBody))
    async def count_tokens(http: HttpRequest) -> Response:
        """The number of tokens of a conversation, in Anthropic's shape."""
        return await answer_at_once(front, http, read_count)
