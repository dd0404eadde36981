"""POST /v1/chat/completions answers a conversation, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from fastapi import Request as HttpRequest
from fastapi import Response

from rota.server.answers.answer import Answer
from rota.server.answers.respond import respond
from rota.server.context import AppContext
from rota.server.openai.chat_fields import ChatCall, read_chat
from rota.server.openai.writer import OpenAiWriter, chat_logprobs, prompt_logprobs
from rota.server.streams import Delta
from rota.text.parsed_delta import CallPiece, ParsedDelta

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


async def chat_completions(context: AppContext, http: HttpRequest) -> Response:
    """Continue a conversation."""
    return await respond(context, http, read_chat, ChatWriter, "chatcmpl-")


class ChatWriter(OpenAiWriter):
    """A message. In a stream, the first event of each choice also has the role."""

    event_kind = "chat.completion.chunk"
    whole_kind = "chat.completion"

    def __init__(self, answer: Answer, call: ChatCall) -> None:
        prompt = call.prompts.tokens[0]
        super().__init__(answer, call, prompt if call.tells_tokens else None)
        self._call = call
        self._prompt = prompt
        self._begun: set[int] = set()

    def piece(self, delta: Delta) -> dict[str, Any] | None:
        said = delta.said
        if not (said or delta.logprobs or delta.finish_reason or (self._call.tells_tokens and delta.tokens)):
            return None
        message = delta_of(said, self._call.is_old_form)
        if delta.position not in self._begun:
            self._begun.add(delta.position)
            message = {"role": "assistant", "content": None if said.calls else "", **message}
        return self._around(delta, "delta", message)

    def complete(self, delta: Delta) -> dict[str, Any]:
        return self._around(delta, "message", message_of(delta.said, self._call.is_old_form))

    def _around(self, delta: Delta, name: str, content: dict[str, Any]) -> dict[str, Any]:
        return {
            "index": delta.position,
            name: content,
            "logprobs": chat_logprobs(self.namer, delta) if self._call.has_logprobs else None,
            "finish_reason": self._finish_reason(delta),
            **({"token_ids": delta.tokens} if self._call.tells_tokens else {}),
        }

    def _finish_reason(self, delta: Delta) -> str | None:
        reason = delta.finish_reason
        if reason != "tool_calls":
            return reason
        return "stop" if self._call.is_named else "function_call" if self._call.is_old_form else reason

    def about_prompt(self, first: Delta) -> dict[str, Any]:
        if not self._call.tells_prompt_logprobs:
            return {}
        return {"prompt_logprobs": prompt_logprobs(self.namer.pieces, self._prompt, first.scores)}
