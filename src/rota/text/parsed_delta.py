"""What a model said, sorted by who reads it: the user, the log of its thoughts, or a program that it calls."""

from __future__ import annotations

from msgspec import Struct


# A struct, because every token of an answer makes one: it is made in a quarter of a dataclass's time.
class CallPiece(Struct, frozen=True, kw_only=True):
    """A piece of a tool call. The first piece of a call has its id and name; all pieces together have its arguments."""

    index: int
    call_id: str = ""
    name: str = ""
    arguments: str = ""


class ParsedDelta(Struct, frozen=True):
    """New text of an answer, each character in exactly one place."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def __add__(self, later: ParsedDelta) -> ParsedDelta:
        return ParsedDelta(self.content + later.content, self.reasoning + later.reasoning, self.calls + later.calls)

    @property
    def whole_calls(self) -> list[CallPiece]:
        """Each call in one piece, if these are all the pieces of an answer."""
        whole: dict[int, CallPiece] = {}
        for piece in self.calls:
            begun = whole.get(piece.index, CallPiece(index=piece.index))
            whole[piece.index] = CallPiece(
                index=piece.index,
                call_id=begun.call_id or piece.call_id,
                name=begun.name or piece.name,
                arguments=begun.arguments + piece.arguments,
            )
        return list(whole.values())


NOTHING_SAID = ParsedDelta()
