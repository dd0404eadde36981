"""A text stream turns one request's tokens into the text that its client sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rota.core.request import SamplingParams
from rota.text.detokenizer import Detokenizer
from rota.text.pieces import TokenPieces
from rota.text.stops import StopWatcher
from rota.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """New text. `is_stopped`: a stop string ended the text, and nothing follows."""

    text: str
    is_stopped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """Which parts of an answer its client sees as text."""

    # Special tokens have a text: all, or only those in `shown`.
    shows_special: bool = False
    shown: frozenset[int] = frozenset()
    # The stop string or token that ends the text is part of it.
    keeps_stop: bool = False
    # Stop strings that are complete within the first tokens are text like any other.
    min_tokens: int = 0
    # Tokens that end the answer.
    stop_token_ids: frozenset[int] = frozenset()

    def shown_of(self, pieces: TokenPieces) -> frozenset[int]:
        """The special tokens that have a text."""
        return pieces.special if self.shows_special else self.shown

    def with_ends_of(self, sampling: SamplingParams) -> TextOptions:
        """The same options, with the request's own tokens that end its answer."""
        return replace(self, min_tokens=sampling.min_new_tokens, stop_token_ids=sampling.stop_token_ids)


PLAIN_TEXT = TextOptions()


class TextStream:
    """Detokenizer and stop strings of one request. After a stopped piece the caller aborts the request."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        is_continuation: bool = True,
        options: TextOptions = PLAIN_TEXT,
    ) -> None:
        """`is_continuation`: the text continues its prompt. False for an answer in a chat."""
        self._detokenizer = Detokenizer(tokenizer.pieces, is_continuation, options.shown_of(tokenizer.pieces))
        self._watcher = StopWatcher(stop, options.keeps_stop)
        self._hidden = frozenset() if options.keeps_stop else options.stop_token_ids - options.shown
        self._min_tokens = options.min_tokens
        self._count = 0

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._watcher.matched

    def push(self, tokens: Sequence[int]) -> Piece:
        self._count += len(tokens)
        if not self._hidden.isdisjoint(tokens):
            tokens = [token for token in tokens if token not in self._hidden]
        text = self._watcher.push(self._detokenizer.push(tokens), self._count > self._min_tokens)
        return Piece(text, self._watcher.matched is not None)

    def finish(self) -> Piece:
        """The last piece: the text that was held back."""
        text = self._watcher.push(self._detokenizer.finish(), self._count > self._min_tokens)
        return Piece(text + self._watcher.finish(), self._watcher.matched is not None)
