"""Calls between tags: JSON, then the tag that ends them."""

from __future__ import annotations

from rota.text.tools.calls import Calls, Verdict
from rota.text.tools.json_calls import JsonCalls


class TaggedCalls:
    """Reads what follows the first tag."""

    def __init__(self, calls: Calls, end: str) -> None:
        self._json: JsonCalls | None = JsonCalls(calls)
        self._end = end
        self._matched = 0  # characters of the end that have been read

    def read(self, text: str, at: int) -> tuple[int, Verdict]:
        if self._json is None:
            return self._read_end(text[at], at)
        at, verdict = self._json.read(text, at)
        if verdict is Verdict.DONE:
            self._json, verdict = None, Verdict.SENT
        return at, verdict

    def _read_end(self, sign: str, at: int) -> tuple[int, Verdict]:
        if not self._matched and sign in " \t\n\r":
            return at + 1, Verdict.HELD
        if sign != self._end[self._matched]:
            return at, Verdict.BROKEN
        self._matched += 1
        return at + 1, Verdict.DONE if self._matched == len(self._end) else Verdict.HELD
