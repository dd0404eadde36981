"""Markers are texts that change what the text behind them means; in a stream one may come in pieces."""

from __future__ import annotations

import re
from collections.abc import Iterable


class Markers:
    """Finds the first of several markers in a text, and the beginning of one at the text's end."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        beginnings = {text[:size] for text in texts for size in range(1, len(text))}
        self._longest = max(map(len, texts))
        self._whole = re.compile(_any_of(texts))
        self._beginning = re.compile(f"(?:{_any_of(beginnings)})\\Z" if beginnings else "(?!)")

    def find(self, text: str, at: int) -> tuple[int, int] | None:
        """Where the first marker from `at` on begins and ends."""
        found = self._whole.search(text, at)
        return found.span() if found else None

    def at(self, text: str, at: int) -> int:
        """How long the marker is that begins exactly here; 0: none does."""
        found = self._whole.match(text, at)
        return len(found[0]) if found else 0

    def may_begin(self, text: str, at: int) -> bool:
        """Whether the text from `at` on is the beginning of a marker."""
        return self._beginning.match(text, at) is not None

    def held(self, text: str, at: int) -> int:
        """The longest end of the text from `at` on that begins a marker; 0: nothing has to be held back."""
        found = self._beginning.search(text, max(at, len(text) - self._longest + 1))
        return len(found[0]) if found else 0


def _any_of(texts: Iterable[str]) -> str:
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
