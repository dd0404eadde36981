"""What a model says is sorted and cut into a sequence: thoughts, text and calls, one after another."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from rota.server.answers.answer import AnswerChunk, Choice, Part
from rota.text.parsed_delta import CallPiece, ParsedDelta
from rota.text.speech import OutputParser, Speech

# ── listening ───────────────────────────────────────────────────────────────────────────────────────────────────────
# Listeners sort the text of every choice of an answer: content, reasoning, tool calls.

__all__ = ["OutputParsers", "Speech"]


class OutputParsers:
    """One listener a choice. Every chunk goes through `said` once, in its order; `finish_reason` is asked after it."""

    def __init__(self, speech: Speech) -> None:
        self._speech = speech
        self._listeners: dict[Choice, OutputParser] = {}
        self._callers: set[Choice] = set()

    def said(self, choice: Choice, chunk: AnswerChunk) -> ParsedDelta:
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

    def finish_reason(self, choice: Choice, chunk: AnswerChunk) -> str | None:
        """Why a choice ended, in OpenAI's words: 'tool_calls' if it made calls and was not cut short."""
        return "tool_calls" if chunk.finish_reason == "stop" and choice in self._callers else chunk.finish_reason


# ── blocks ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# Blocks cut what a model says into a sequence: thoughts, text and calls, one after another.

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True, eq=False)
class Block:
    """A part of an answer. The text of a call is its arguments."""

    index: int
    kind: Kind
    call: CallPiece = field(default_factory=lambda: CallPiece(index=0))
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class BlockStep(Enum):
    BEGUN = "begun"
    ADDED = "added"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Change:
    """A block begins, gets more text, or ends."""

    step: BlockStep
    block: Block
    text: str = ""


class AnswerBlocks:
    """The blocks of an answer with one choice. Every chunk is heard once, in its order."""

    def __init__(self, speech: Speech) -> None:
        self._listeners = OutputParsers(speech)
        self._open: tuple[Kind, int] | None = None
        self.all: list[Block] = []
        # Of an answer that is not streamed: texts alone, for the garbage collector's sake.
        self._contents: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[CallPiece] = []
        self.reasoning_tokens = 0
        self.finish_reason: str | None = None

    def hear(self, part: Part) -> Iterator[Change]:
        """What a part changes. Its last part ends the last block."""
        yield from self._say(self._said(part))
        if self.finish_reason:
            yield from self._finish()

    def gather(self, part: Part) -> None:
        """A part of an answer whose blocks are asked for at its end."""
        said = self._said(part)
        self._contents.append(said.content)
        self._thoughts.append(said.reasoning)
        self._calls += said.calls

    def hear_all(self, parts: Sequence[Part]) -> list[Block]:
        """The blocks of a whole answer, of which these are the last parts."""
        for part in parts:
            self.gather(part)
        whole = ParsedDelta("".join(self._contents), "".join(self._thoughts), tuple(self._calls))
        for _ in self._say(whole):
            pass
        for _ in self._finish():
            pass
        return self.all

    def _said(self, part: Part) -> ParsedDelta:
        said = self._listeners.said(part.choice, part.chunk)
        if said.reasoning and not said.content:
            self.reasoning_tokens += len(part.chunk.tokens)
        self.finish_reason = self._listeners.finish_reason(part.choice, part.chunk)
        return said

    def _say(self, said: ParsedDelta) -> Iterator[Change]:
        if said.reasoning:
            yield from self._add("reasoning", said.reasoning)
        if said.content:
            yield from self._add("text", said.content)
        for piece in said.calls:
            yield from self._add("call", piece.arguments, piece)

    def _add(self, kind: Kind, text: str, call: CallPiece | None = None) -> Iterator[Change]:
        key = (kind, call.index if call else 0)
        if self._open != key:
            yield from self._end()
            self._open = key
            block = Block(len(self.all), kind, call or CallPiece(index=0))
            self.all.append(block)
            yield Change(BlockStep.BEGUN, block)
        if text:
            self.all[-1].pieces.append(text)
            yield Change(BlockStep.ADDED, self.all[-1], text)

    def _end(self) -> Iterator[Change]:
        if self._open:
            self._open = None
            yield Change(BlockStep.ENDED, self.all[-1])

    def _finish(self) -> Iterator[Change]:
        if not self.all:  # an answer without a character is an empty text
            yield from self._add("text", "")
        yield from self._end()
