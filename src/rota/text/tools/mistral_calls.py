"""Mistral's calls behind their tag: a list of JSON objects, or in newer models a name and its arguments."""

from __future__ import annotations

import re

from rota.text.tools.calls import Calls, Verdict
from rota.text.tools.json_calls import JsonCalls
from rota.text.tools.json_value import JsonValue

_HEAD = re.compile(r"[-\w\s\[\]]*")
_WHOLE_HEAD = re.compile(r"\s*([-\w]+)\s*(?:\[CALL_ID\]\w+)?\s*(?:\[ARGS\])?\s*")
_MAX_HEAD = 200


class MistralCalls:
    """Reads what follows the tag. Each of several calls of the newer form has a tag of its own."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._head = ""
        self._list: JsonCalls | None = None
        self._arguments: JsonValue | None = None

    def read(self, text: str, at: int) -> tuple[int, Verdict]:
        if self._list:
            return self._list.read(text, at)
        if self._arguments:
            return self._read_arguments(self._arguments, text, at)
        if not self._head.strip() and text[at] in "[{":
            self._list = JsonCalls(self._calls)
            return at, Verdict.HELD
        return self._read_head(text, at)

    def _read_head(self, text: str, at: int) -> tuple[int, Verdict]:
        # A character at a time until the name begins: what follows blanks decides between the two forms.
        room = _MAX_HEAD - len(self._head) if self._head.strip() else 1
        found = _HEAD.match(text, at, min(len(text), at + room))
        if found and found[0]:
            self._head += found[0]
            return found.end(), Verdict.HELD
        whole = _WHOLE_HEAD.fullmatch(self._head)
        if text[at] != "{" or not whole or whole[1] not in self._calls.names:
            return at, Verdict.BROKEN
        self._calls.begin(whole[1])
        self._arguments = JsonValue()
        return at, Verdict.SENT

    def _read_arguments(self, arguments: JsonValue, text: str, at: int) -> tuple[int, Verdict]:
        end = arguments.read(text, at)
        if end > at:
            self._calls.add(text[at:end])
        if arguments.is_complete:
            return end, Verdict.DONE
        return end, Verdict.SENT if end > at else Verdict.BROKEN
