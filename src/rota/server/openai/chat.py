"""POST /v1/chat/completions answers a conversation, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest

from rota.server.answer import ParsedCall, SentAs, requests_for
from rota.server.choices import Choice, Chunk
from rota.server.front import Front
from rota.server.openai.bodies import ChatBody, ChatChunkBody
from rota.server.openai.chat_fields import ChatFields, read_chat
from rota.server.openai.logprobs import chat_logprobs
from rota.server.openai.model_names import model_for
from rota.server.openai.sampling_fields import StreamOptions
from rota.server.openai.shape import OpenAiShape
from rota.server.openapi import gives, takes
from rota.server.respond import respond
from rota.text.tokenizer import Tokenizer


def install_chat_route(app: FastAPI, front: Front) -> None:
    @app.post("/v1/chat/completions", openapi_extra=takes(ChatFields), responses=gives(ChatBody, ChatChunkBody))
    async def chat_completions(http: HttpRequest) -> Response:
        """Continue a conversation."""
        call = front.identify(http)
        read = await front.read(call.key, http, read_chat)
        model = model_for(front, call, read.names)
        answer_id = f"chatcmpl-{call.name}"
        requests = requests_for(
            call, answer_id, model, read.prompts.tokens, read.sampling, read.choices, read.cache_salt
        )
        shape = ChatShape(answer_id, model.name, read.options, front.tokenizer, read.has_logprobs)
        parsed = ParsedCall(
            call,
            answer_id,
            requests,
            read.choices,
            is_continuation=False,
            sent_as=(SentAs("messages", read.names.param),),
            limit_param=read.limit_param,
        )
        return await respond(front, http, parsed, shape, read.is_streamed)


class ChatShape(OpenAiShape):
    """A message. In a stream, the first event of each choice also has the role."""

    event_kind = "chat.completion.chunk"
    whole_kind = "chat.completion"

    def __init__(
        self, answer_id: str, model: str, options: StreamOptions, tokenizer: Tokenizer, has_logprobs: bool
    ) -> None:
        super().__init__(answer_id, model, options)
        self._pieces = tokenizer.pieces
        self._has_logprobs = has_logprobs
        self._begun: set[int] = set()

    def piece(self, choice: Choice, chunk: Chunk) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": chunk.text} if chunk.text else {}
        if choice.position not in self._begun:
            self._begun.add(choice.position)
            delta = {"role": "assistant", "content": chunk.text}
        return self._around(choice, chunk, "delta", delta)

    def complete(self, choice: Choice, chunk: Chunk) -> dict[str, Any]:
        return self._around(choice, chunk, "message", {"role": "assistant", "content": chunk.text, "refusal": None})

    def _around(self, choice: Choice, chunk: Chunk, name: str, content: dict[str, Any]) -> dict[str, Any]:
        return {
            "index": choice.position,
            name: content,
            "logprobs": chat_logprobs(self._pieces, chunk) if self._has_logprobs else None,
            "finish_reason": chunk.finish_reason,
        }
