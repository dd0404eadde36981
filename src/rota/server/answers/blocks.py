"""What a model says is sorted and cut into a sequence: thoughts, text and calls, one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import msgspec

from rota.server.streams import Delta
from rota.text.parsed_delta import CallPiece, ParsedDelta

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

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a call. Those of a call that was cut short are none: no client may run it."""
        try:
            found = msgspec.json.decode(self.text)
        except msgspec.DecodeError:
            return {}
        return found if isinstance(found, dict) else {}


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
    """The blocks of an answer with one choice. Every delta is heard once, in its order."""

    def __init__(self) -> None:
        self._open: tuple[Kind, int] | None = None
        self.all: list[Block] = []
        self.finish_reason: str | None = None

    def hear(self, delta: Delta) -> Iterator[Change]:
        """What a delta changes. The last delta ends the last block."""
        self.finish_reason = delta.finish_reason
        yield from self._say(delta.said)
        if self.finish_reason:
            yield from self._finish()

    def hear_all(self, deltas: Sequence[Delta]) -> list[Block]:
        """The blocks of a whole answer."""
        for delta in deltas:
            for _ in self.hear(delta):
                pass
        return self.all

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
