"""A stop string ends the text before or behind it, also where it begins or ends inside a token."""

from __future__ import annotations


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
            start, self.matched = match
            self._held = ""
            return text[: start + len(self.matched)] if self._keeps_stop else text[:start]
        safe = len(text) - self._beginning_length(text)
        self._held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """The text that was held back. No more text comes, so it cannot become a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        found = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _beginning_length(self, text: str) -> int:
        """The longest end of `text` that begins a stop string."""
        longest = 0
        for stop in self._stop:
            # Jump from one occurrence of the first character to the next. Usually there is none.
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while start >= 0 and not stop.startswith(text[start:]):
                start = text.find(stop[0], start + 1)
            if start >= 0:
                longest = max(longest, len(text) - start)
        return longest
