"""A text stream turns one request's tokens into the text that its client sees."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rota.text.detokenizer import Detokenizer
from rota.text.stops import StopWatcher
from rota.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """New text. `is_stopped`: a stop string ended the text, and nothing follows."""

    text: str
    is_stopped: bool


class TextStream:
    """Detokenizer and stop strings of one request. After a stopped piece the caller aborts the request."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), is_continuation: bool = True) -> None:
        """`is_continuation`: the text continues its prompt. False for an answer in a chat."""
        self._detokenizer = Detokenizer(tokenizer.pieces, is_continuation)
        self._watcher = StopWatcher(stop)

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._watcher.matched

    def push(self, tokens: Iterable[int]) -> Piece:
        return self._piece(self._watcher.push(self._detokenizer.push(tokens)))

    def finish(self) -> Piece:
        """The last piece: the text that was held back."""
        text = self._watcher.push(self._detokenizer.finish())
        return self._piece(text + self._watcher.finish())

    def _piece(self, text: str) -> Piece:
        return Piece(text, self._watcher.matched is not None)
