"""What a model said becomes OpenAI's message, whole or in the deltas of a stream."""

from __future__ import annotations

from typing import Any

from rota.text.said import CallPiece, Said


def delta_of(said: Said, is_old_form: bool = False) -> dict[str, Any]:
    """New text as OpenAI streams it: the first piece of a call has its id and name, the others its arguments alone.

    A delta names a call once. The stream helper of the `openai` package would make two calls of two entries.
    """
    delta: dict[str, Any] = {"content": said.content} if said.content else {}
    if said.reasoning:
        delta |= _reasoning(said)
    if said.calls:
        delta |= _old_delta(said) if is_old_form else {"tool_calls": [_call_delta(piece) for piece in said.whole_calls]}
    return delta


def message_of(said: Said, is_old_form: bool = False) -> dict[str, Any]:
    """A whole answer as OpenAI's message. A message that only calls has no content."""
    calls = said.whole_calls
    message: dict[str, Any] = {"role": "assistant", "content": said.content or (None if calls else "")}
    message["refusal"] = None
    if said.reasoning:
        message |= _reasoning(said)
    if calls and is_old_form:
        return message | {"function_call": _function(calls[0])}
    return message | ({"tool_calls": [_call(call) for call in calls]} if calls else {})


def _reasoning(said: Said) -> dict[str, Any]:
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


def _old_delta(said: Said) -> dict[str, Any]:
    """The older form has one call, which a grammar has kept."""
    call = said.whole_calls[0]
    return {"function_call": _function(call) if call.name else {"arguments": call.arguments}}
