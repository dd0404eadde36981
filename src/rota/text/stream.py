"""A text stream turns one request's tokens into the text that its client sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rota.core.request import SamplingParams
from rota.text.markers import beginning_length
from rota.text.pieces import Detokenizer, TokenPieces
from rota.text.tokenizer import Tokenizer

# ── stops ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# A stop string ends the text before or behind it, also where it begins or ends inside a token.


class StopWatcher:
    """Lets text through until a stop string is complete. Holds back text that may begin a stop string.

    The stop string that is complete first wins, because nothing is generated after it. If several are complete at
    the same character, the longest wins, so that no part of a stop string is let through.
    """

    def __init__(self, stop: tuple[str, ...], keeps_stop: bool = False) -> None:
        """`keeps_stop`: the stop string is part of the text."""
        self._stop = stop
        self._keeps_stop = keeps_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, may_stop: bool = True) -> str:
        """The text that cannot be part of a stop string any more. One that is complete too early is text like any."""
        if self.matched is not None:
            return ""
        text = self._held + text
        if may_stop and (match := self._first_match(text)):
            _, start, self.matched = match
            self._held = ""
            return text[: start + len(self.matched)] if self._keeps_stop else text[:start]
        safe = len(text) - beginning_length(text, self._stop)
        self._held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """The text that was held back. No more text comes, so it cannot become a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, int, str] | None:
        """Where the stop string ends that is complete first, and where it begins."""
        found = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        return min(found, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """Which parts of an answer its client sees as text."""

    # Special tokens have a text: all, or only those in `shown`.
    shows_special: bool = False
    shown: frozenset[int] = frozenset()
    # The stop string or token that ends the text is part of it.
    keeps_stop: bool = False

    def shown_of(self, pieces: TokenPieces) -> frozenset[int]:
        """The special tokens that have a text."""
        return pieces.special if self.shows_special else self.shown


PLAIN_TEXT = TextOptions()


class TextStream:
    """Detokenizer and stop strings of one request. Once it is stopped, the caller aborts the request."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        is_continuation: bool = True,
        options: TextOptions = PLAIN_TEXT,
    ) -> None:
        """`is_continuation`: the text continues its prompt. False for an answer in a chat."""
        self._detokenizer = Detokenizer(tokenizer.pieces, is_continuation, options.shown_of(tokenizer.pieces))
        self._watcher = StopWatcher(sampling.stop, options.keeps_stop)
        self._hidden = frozenset() if options.keeps_stop else sampling.stop_token_ids - options.shown
        # Stop strings that are complete within the first tokens are text like any other.
        self._min_tokens = sampling.min_new_tokens
        self._count = 0

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text, if one did. No text follows it."""
        return self._watcher.matched

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete."""
        self._count += len(tokens)
        if not self._hidden.isdisjoint(tokens):
            tokens = [token for token in tokens if token not in self._hidden]
        return self._watcher.push(self._detokenizer.push(tokens), self._count > self._min_tokens)

    def finish(self) -> str:
        """The text that was held back. No more tokens come."""
        text = self._watcher.push(self._detokenizer.finish(), self._count > self._min_tokens)
        return text + self._watcher.finish()
