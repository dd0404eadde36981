"""Bad words are token sequences that an answer must not hold: the last token of one may not follow the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class BadWords:
    """Words of several tokens, and the end of one answer. A word of a single token never comes, and needs no memory."""

    def __init__(self, words: Iterable[Sequence[int]], answer: Sequence[int]) -> None:
        self._endings: dict[tuple[int, ...], list[int]] = {}  # by the tokens before the last
        for word in words:
            if len(word) > 1:
                self._endings.setdefault(tuple(word[:-1]), []).append(word[-1])
        self._lengths = sorted({len(beginning) for beginning in self._endings})
        self._longest = max(self._lengths, default=0)
        self._last: tuple[int, ...] = ()
        for token in answer[-self._longest :]:
            self.accept(token)

    def accept(self, token: int) -> None:
        self._last = (*self._last, token)[-self._longest :]

    @property
    def forbidden(self) -> list[int]:
        """The tokens that would complete a word."""
        beginnings = (self._last[-length:] for length in self._lengths)
        return [token for beginning in beginnings for token in self._endings.get(beginning, ())]


def needs_memory(words: Iterable[Sequence[int]]) -> bool:
    return any(len(word) > 1 for word in words)
