"""POST /v1/chat/completions answers a conversation, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest

from rota.server.answer import ParsedCall, SentAs, requests_for
from rota.server.choices import Choice, Chunk
from rota.server.front import Front
from rota.server.listening import Listeners
from rota.server.open_answers import Call
from rota.server.openai.bodies import ChatBody, ChatChunkBody
from rota.server.openai.chat_fields import ChatCall, ChatFields, read_chat
from rota.server.openai.logprobs import TokenNamer, chat_logprobs, prompt_logprobs
from rota.server.openai.messages import delta_of, message_of
from rota.server.openai.model_names import model_for
from rota.server.openai.shape import OpenAiShape
from rota.server.openapi import gives, takes
from rota.server.respond import respond
from rota.server.traffic.route import Chosen
from rota.text.tokenizer import Tokenizer


def install_chat_route(app: FastAPI, front: Front) -> None:
    @app.post("/v1/chat/completions", openapi_extra=takes(ChatFields), responses=gives(ChatBody, ChatChunkBody))
    async def chat_completions(http: HttpRequest) -> Response:
        """Continue a conversation."""
        call = front.identify(http)
        read = await front.read(call.key, http, read_chat)
        call = front.named(http, call, read.asks)
        model = model_for(front, call, read.names, read.asks)
        answer_id = f"chatcmpl-{call.name}"
        shape = ChatShape(answer_id, model.adapter.name, read, front.tokenizer)
        parsed = parsed_chat(call, answer_id, model, read)
        return await respond(front, http, parsed, shape, read.is_streamed)


def parsed_chat(call: Call, answer_id: str, model: Chosen, read: ChatCall, param: str = "messages") -> ParsedCall:
    """A chat after its checks; `param` is the field in which the client sent the conversation."""
    return ParsedCall(
        call,
        answer_id,
        requests_for(call, answer_id, model, read.prompts.tokens, read.sampling, read.choices, read.asks),
        read.choices,
        is_continuation=read.is_continued,
        sent_as=(SentAs(param, read.names.param),),
        limit_param=read.limit_param,
        text=read.asks.text,
        chosen=(model,),
    )


class ChatShape(OpenAiShape):
    """A message. In a stream, the first event of each choice also has the role."""

    event_kind = "chat.completion.chunk"
    whole_kind = "chat.completion"

    def __init__(self, answer_id: str, model: str, read: ChatCall, tokenizer: Tokenizer) -> None:
        prompt = read.prompts.tokens[0] if read.asks.tells_tokens else None
        super().__init__(answer_id, model, read.options, prompt)
        self._namer = TokenNamer(tokenizer.pieces, read.asks.names_by_id)
        self._tells_prompt_logprobs = read.tells_prompt_logprobs
        self._prompt = read.prompts.tokens[0]
        self._has_logprobs = read.has_logprobs
        self._listeners = Listeners(read.speech)
        self._form = read.form
        self._begun: set[int] = set()

    def piece(self, choice: Choice, chunk: Chunk) -> dict[str, Any] | None:
        said = self._listeners.said(choice, chunk)
        if not (said or chunk.logprobs or chunk.finish_reason or (self._tells_tokens and chunk.tokens)):
            return None
        delta = delta_of(said, self._form.is_old_form)
        if choice.position not in self._begun:
            self._begun.add(choice.position)
            delta = {"role": "assistant", "content": None if said.calls else "", **delta}
        return self._around(choice, chunk, "delta", delta)

    def complete(self, choice: Choice, chunk: Chunk) -> dict[str, Any]:
        said = self._listeners.said(choice, chunk)
        return self._around(choice, chunk, "message", message_of(said, self._form.is_old_form))

    def _around(self, choice: Choice, chunk: Chunk, name: str, content: dict[str, Any]) -> dict[str, Any]:
        return {
            "index": choice.position,
            name: content,
            "logprobs": chat_logprobs(self._namer, chunk) if self._has_logprobs else None,
            "finish_reason": self._finish_reason(choice, chunk),
            **({"token_ids": chunk.tokens} if self._tells_tokens else {}),
        }

    def _finish_reason(self, choice: Choice, chunk: Chunk) -> str | None:
        reason = self._listeners.finish_reason(choice, chunk)
        if reason != "tool_calls":
            return reason
        return "stop" if self._form.is_named else "function_call" if self._form.is_old_form else reason

    def about_prompt(self, first: Chunk) -> dict[str, Any]:
        if not self._tells_prompt_logprobs:
            return {}
        return {"prompt_logprobs": prompt_logprobs(self._namer.pieces, self._prompt, first.scores)}
