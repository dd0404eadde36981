"""POST /v1/chat/completions answers a conversation, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest

from rota.server.answers.answer import AnswerChunk, Choice, ParsedCall, SentAs, requests_for
from rota.server.answers.blocks import OutputParsers
from rota.server.answers.respond import respond
from rota.server.context import AppContext
from rota.server.docs import gives, takes
from rota.server.open_answers import Call
from rota.server.openai.chat_fields import ChatCall, ChatFields, read_chat
from rota.server.openai.sampling_fields import model_for
from rota.server.openai.writer import ChatBody, ChatChunkBody, OpenAiWriter, TokenNamer, chat_logprobs, prompt_logprobs
from rota.server.traffic.route import Chosen
from rota.text.parsed_delta import CallPiece, ParsedDelta
from rota.text.tokenizer import Tokenizer

# ── messages ────────────────────────────────────────────────────────────────────────────────────────────────────────
# What a model said becomes OpenAI's message, whole or in the deltas of a stream.


def delta_of(said: ParsedDelta, is_old_form: bool = False) -> dict[str, Any]:
    """New text as OpenAI streams it: the first piece of a call has its id and name, the others its arguments alone.

    A delta names a call once. The stream helper of the `openai` package would make two calls of two entries.
    """
    delta: dict[str, Any] = {"content": said.content} if said.content else {}
    if said.reasoning:
        delta |= _reasoning(said)
    if said.calls:
        delta |= _old_delta(said) if is_old_form else {"tool_calls": [_call_delta(piece) for piece in said.whole_calls]}
    return delta


def message_of(said: ParsedDelta, is_old_form: bool = False) -> dict[str, Any]:
    """A whole answer as OpenAI's message. A message that only calls has no content."""
    calls = said.whole_calls
    message: dict[str, Any] = {"role": "assistant", "content": said.content or (None if calls else "")}
    message["refusal"] = None
    if said.reasoning:
        message |= _reasoning(said)
    if calls and is_old_form:
        return message | {"function_call": _function(calls[0])}
    return message | ({"tool_calls": [_call(call) for call in calls]} if calls else {})


def _reasoning(said: ParsedDelta) -> dict[str, Any]:
    # The older name is DeepSeek's, and most clients read it; the newer one is vLLM's.
    return {"reasoning_content": said.reasoning, "reasoning": said.reasoning}


def _call(piece: CallPiece) -> dict[str, Any]:
    return {"id": piece.call_id, "type": "function", "function": _function(piece)}


def _function(piece: CallPiece) -> dict[str, Any]:
    return {"name": piece.name, "arguments": piece.arguments}


def _call_delta(piece: CallPiece) -> dict[str, Any]:
    if piece.name:
        return {"index": piece.index, **_call(piece)}
    return {"index": piece.index, "function": {"arguments": piece.arguments}}


def _old_delta(said: ParsedDelta) -> dict[str, Any]:
    """The older form has one call, which a grammar has kept."""
    call = said.whole_calls[0]
    return {"function_call": _function(call) if call.name else {"arguments": call.arguments}}


def install_chat_route(app: FastAPI, context: AppContext) -> None:
    @app.post("/v1/chat/completions", openapi_extra=takes(ChatFields), responses=gives(ChatBody, ChatChunkBody))
    async def chat_completions(http: HttpRequest) -> Response:
        """Continue a conversation."""
        call = context.identify(http)
        read = await context.read(call.key, http, read_chat)
        call = context.named(http, call, read.call_options)
        model = model_for(context, call, read.names, read.call_options)
        answer_id = f"chatcmpl-{call.name}"
        writer = ChatWriter(answer_id, model.adapter.name, read, context.tokenizer)
        parsed = parsed_chat(call, answer_id, model, read)
        return await respond(context, http, parsed, writer, read.is_streamed)


def parsed_chat(call: Call, answer_id: str, model: Chosen, read: ChatCall, param: str = "messages") -> ParsedCall:
    """A chat after its checks; `param` is the field in which the client sent the conversation."""
    return ParsedCall(
        call,
        answer_id,
        requests_for(call, answer_id, model, read.prompts.tokens, read.sampling, read.choices, read.call_options),
        read.choices,
        is_continuation=read.is_continued,
        sent_as=(SentAs(param, read.names.param),),
        limit_param=read.limit_param,
        text=read.call_options.text,
        chosen=(model,),
    )


class ChatWriter(OpenAiWriter):
    """A message. In a stream, the first event of each choice also has the role."""

    event_kind = "chat.completion.chunk"
    whole_kind = "chat.completion"

    def __init__(self, answer_id: str, model: str, read: ChatCall, tokenizer: Tokenizer) -> None:
        prompt = read.prompts.tokens[0] if read.call_options.tells_tokens else None
        super().__init__(answer_id, model, read.options, prompt)
        self._namer = TokenNamer(tokenizer.pieces, read.call_options.names_by_id)
        self._tells_prompt_logprobs = read.tells_prompt_logprobs
        self._prompt = read.prompts.tokens[0]
        self._has_logprobs = read.has_logprobs
        self._listeners = OutputParsers(read.speech)
        self._form = read.form
        self._begun: set[int] = set()

    def piece(self, choice: Choice, chunk: AnswerChunk) -> dict[str, Any] | None:
        said = self._listeners.said(choice, chunk)
        if not (said or chunk.logprobs or chunk.finish_reason or (self._tells_tokens and chunk.tokens)):
            return None
        delta = delta_of(said, self._form.is_old_form)
        if choice.position not in self._begun:
            self._begun.add(choice.position)
            delta = {"role": "assistant", "content": None if said.calls else "", **delta}
        return self._around(choice, chunk, "delta", delta)

    def complete(self, choice: Choice, chunk: AnswerChunk) -> dict[str, Any]:
        said = self._listeners.said(choice, chunk)
        return self._around(choice, chunk, "message", message_of(said, self._form.is_old_form))

    def _around(self, choice: Choice, chunk: AnswerChunk, name: str, content: dict[str, Any]) -> dict[str, Any]:
        return {
            "index": choice.position,
            name: content,
            "logprobs": chat_logprobs(self._namer, chunk) if self._has_logprobs else None,
            "finish_reason": self._finish_reason(choice, chunk),
            **({"token_ids": chunk.tokens} if self._tells_tokens else {}),
        }

    def _finish_reason(self, choice: Choice, chunk: AnswerChunk) -> str | None:
        reason = self._listeners.finish_reason(choice, chunk)
        if reason != "tool_calls":
            return reason
        return "stop" if self._form.is_named else "function_call" if self._form.is_old_form else reason

    def about_prompt(self, first: AnswerChunk) -> dict[str, Any]:
        if not self._tells_prompt_logprobs:
            return {}
        return {"prompt_logprobs": prompt_logprobs(self._namer.pieces, self._prompt, first.scores)}
