"""Markers are texts that change what the text behind them means; in a stream one may come in pieces."""

from __future__ import annotations

from collections.abc import Iterable


def beginning_length(text: str, wholes: Iterable[str], at: int = 0) -> int:
    """The longest end of the text from `at` on that begins one of several texts; 0: nothing has to be held back."""
    longest = 0
    for whole in wholes:
        # Jump from one occurrence of the first character to the next. Usually there is none.
        start = text.find(whole[0], max(at, len(text) - len(whole) + 1))
        while start >= 0 and not whole.startswith(text[start:]):
            start = text.find(whole[0], start + 1)
        if start >= 0:
            longest = max(longest, len(text) - start)
    return longest


class Markers:
    """Finds the first of several markers in a text, and the beginning of one at the text's end.

    No marker is the beginning of another.
    """

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def find(self, text: str, at: int) -> tuple[int, int] | None:
        """Where the first marker from `at` on begins and ends."""
        found = [(start, start + len(one)) for one in self.texts if (start := text.find(one, at)) >= 0]
        return min(found, default=None)

    def at(self, text: str, at: int) -> int:
        """How long the marker is that begins exactly here; 0: none does."""
        return next((len(one) for one in self.texts if text.startswith(one, at)), 0)

    def may_begin(self, text: str, at: int) -> bool:
        """Whether the text from `at` on, which is no whole marker, is the beginning of one."""
        return any(one.startswith(text[at : at + len(one)]) for one in self.texts)

    def held(self, text: str, at: int) -> int:
        """The longest end of the text from `at` on that begins a marker; 0: nothing has to be held back."""
        return beginning_length(text, self.texts, at)
