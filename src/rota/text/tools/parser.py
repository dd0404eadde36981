"""A tool parser sorts the text of one answer into content and calls; no character is in both, or in none."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from rota.text.markers import Markers
from rota.text.parsed_delta import CallPiece, ParsedDelta

# ── calls ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# The calls of one answer: numbered, with ids, and sent in pieces while they are read.


class CallVerdict(Enum):
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


_BLANKS = " \t\n\r"


class CallReader(Protocol):
    """Reads calls where they begin."""

    def read(self, text: str, at: int) -> tuple[int, CallVerdict]:
        """Read one thing from `at` on, which is before the text's end. Gives where that ends."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How a family of models writes calls."""

    # Texts that begin calls wherever they stand.
    markers: Markers
    # Signs that begin calls at the beginning of an answer, and behind other calls.
    openings: str = ""
    # What may stand between calls, beside blanks.
    separators: str = ""
    # Further texts within calls that may be special tokens.
    within: tuple[str, ...] = ()
    # Made where calls begin.
    reader: Callable[[Calls], CallReader]


class ToolParser:
    """Holds back text that may be a call. A call is sent once its name is known: a fault behind that is content.

    Blanks before, between and behind calls belong to the calls.
    """

    def __init__(self, form: Format, names: Set[str], new_id: Callable[[], str]) -> None:
        self._form = form
        self._markers = form.markers
        self._calls = Calls(names, new_id)
        self._reader: CallReader | None = None
        self._read: Callable[[], bool] = self._read_between
        self._content: list[str] = []
        self._held: list[str] = []  # has been read, and may be part of a call
        self._text = ""
        self._begin = 0  # of the text that has been read and is held back
        self._at = 0  # what is read next

    def push(self, text: str) -> ParsedDelta:
        self._text = self._text + text if self._text else text
        while self._at < len(self._text) and self._read():
            pass
        if self._at:
            if self._begin < self._at:
                self._held.append(self._text[self._begin : self._at])
            self._text, self._begin, self._at = self._text[self._at :], 0, 0
        return self._said(self._calls.take())

    def finish(self) -> ParsedDelta:
        """What was held back. No more text comes."""
        text = "".join(self._held) + self._text
        if not self._calls.count or text.strip(_BLANKS):
            self._content.append(text)
        return self._said(self._calls.take(is_last=True))

    def _said(self, calls: tuple[CallPiece, ...]) -> ParsedDelta:
        content = ""
        if self._content:
            content, self._content = "".join(self._content), []
        return ParsedDelta(content, "", calls)

    def _read_between(self) -> bool:
        """At the beginning, and behind calls. Whether there is more to read."""
        at, text = self._at, self._text
        while at < len(text) and text[at] in _BLANKS + self._form.separators:
            at += 1
        self._at = at
        if at == len(text):
            return False
        if length := self._markers.at(text, at):
            self._enter(at + length)
        elif self._markers.may_begin(text, at):
            return False
        elif text[at] in self._form.openings:
            self._enter(at)
        else:
            self._read = self._read_content
        return True

    def _read_content(self) -> bool:
        if found := self._markers.find(self._text, self._begin):
            self._release(found[0])
            self._enter(found[1])
            return True
        self._release(len(self._text) - self._markers.held(self._text, self._begin))
        self._at = self._begin
        return False

    def _read_calls(self) -> bool:
        assert self._reader, "it was made where the calls began"
        self._at, verdict = self._reader.read(self._text, self._at)
        match verdict:
            case CallVerdict.SENT:
                self._account()
            case CallVerdict.DONE:
                self._account()
                self._read = self._read_between
            case CallVerdict.BROKEN:
                self._release(self._at)
                self._read = self._read_content
        return True

    def _enter(self, at: int) -> None:
        self._at = at
        self._reader = self._form.reader(self._calls)
        self._read = self._read_calls

    def _account(self) -> None:
        """All text that has been read is part of calls."""
        self._begin = self._at
        if self._held:
            self._held.clear()

    def _release(self, end: int) -> None:
        """All text up to here is content."""
        if self._held:
            self._content += self._held
            self._held.clear()
        self._content.append(self._text[self._begin : end])
        self._begin = end
