"""The calls of one answer: numbered, with ids, and sent in pieces while they are read."""

from __future__ import annotations

from collections.abc import Callable, Set
from enum import Enum, auto

from rota.text.said import CallPiece


class Verdict(Enum):
    """What a reader of calls thinks of the text that it has just read."""

    HELD = auto()  # it may be part of a call
    SENT = auto()  # it is part of a call, as all before it
    DONE = auto()  # it ends the calls
    BROKEN = auto()  # what follows cannot be part of a call: all text that was held is content


class Calls:
    """Begins calls and adds to the last one's arguments."""

    def __init__(self, names: Set[str], new_id: Callable[[], str]) -> None:
        """`names` are the tools that may be called: a call of another one is no call."""
        self.names = names
        self.count = 0
        self._new_id = new_id
        self._pieces: list[CallPiece] = []

    def begin(self, name: str) -> None:
        self._pieces.append(CallPiece(index=self.count, call_id=self._new_id(), name=name))
        self.count += 1

    def add(self, arguments: str) -> None:
        """Text of the arguments, which are a JSON object in the end."""
        index, before = self.count - 1, ""
        if self._pieces and not self._pieces[-1].name:
            before = self._pieces.pop().arguments
        self._pieces.append(CallPiece(index=index, arguments=before + arguments))

    def take(self, is_last: bool = False) -> tuple[CallPiece, ...]:
        """The pieces since the last time, up to the next beginning of a call; at the end all of them.

        OpenAI sends a call's name before its arguments, and there are clients that expect this.
        """
        pieces = self._pieces
        if not pieces:
            return ()
        if len(pieces) == 1 or is_last:
            self._pieces = []
            return tuple(pieces)
        end = next((number for number, piece in enumerate(pieces, 1) if piece.name), len(pieces))
        self._pieces = pieces[end:]
        return tuple(pieces[:end])
