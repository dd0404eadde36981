"""Listeners sort the text of every choice of an answer: content, reasoning, tool calls."""

from __future__ import annotations

import secrets

from rota.server.choices import Choice, Chunk
from rota.text.said import Said
from rota.text.speech import Listener, Speech

__all__ = ["Listeners", "Speech"]


class Listeners:
    """One listener a choice. Every chunk goes through `said` once, in its order; `finish_reason` is asked after it."""

    def __init__(self, speech: Speech) -> None:
        self._speech = speech
        self._listeners: dict[Choice, Listener] = {}
        self._callers: set[Choice] = set()

    def said(self, choice: Choice, chunk: Chunk) -> Said:
        """What a chunk says. The last chunk also says what was held back."""
        if (listener := self._listeners.get(choice)) is None:
            listener = self._listeners[choice] = self._speech.listener(self._new_id)
        said = listener.push(chunk.text)
        if chunk.finish_reason:
            said += listener.finish()
        if said.calls:
            self._callers.add(choice)
        return said

    def _new_id(self) -> str:
        # Mistral's templates take ids of nine characters, and no others.
        return secrets.token_hex(5)[:9] if self._speech.tools == "mistral" else f"call_{secrets.token_hex(12)}"

    def finish_reason(self, choice: Choice, chunk: Chunk) -> str | None:
        """Why a choice ended, in OpenAI's words: 'tool_calls' if it made calls and was not cut short."""
        return "tool_calls" if chunk.finish_reason == "stop" and choice in self._callers else chunk.finish_reason
