"""Calls as Python writes them: `[weather(city="Rome", days=2), clock()]`."""

from __future__ import annotations

import json
import re

from rota.text.tools.calls import Calls, Verdict
from rota.text.tools.python_literal import PythonLiteral

_HEAD = re.compile(r"[-\w.\s]*")
_MAX_HEAD = 200


class PythonCalls:
    """Reads a list of calls from its bracket on. Every argument is sent as JSON when it is complete."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._wants = "["
        self._head = ""  # the text before the next sign: a name, or blanks
        self._name = ""  # of the call that is read
        self._argument = ""
        self._value: PythonLiteral | None = None
        self._sent = 0  # arguments of the call that is read

    def read(self, text: str, at: int) -> tuple[int, Verdict]:
        """Read one thing from `at` on. Gives where it ends."""
        if self._value:
            return self._read_value(self._value, text, at)
        found = _HEAD.match(text, at, min(len(text), at + _MAX_HEAD - len(self._head)))
        if found and found[0]:
            self._head += found[0]
            return found.end(), Verdict.HELD
        head, self._head = self._head.strip(), ""
        verdict = self._read_sign(head, text[at])
        return at if verdict is Verdict.BROKEN else at + 1, verdict

    def _read_sign(self, head: str, sign: str) -> Verdict:
        match self._wants, head, sign:
            case "[", "", "[":
                self._wants = "call"
            case "call", _, "(" if head in self._calls.names:
                self._wants, self._name, self._sent = "argument", head, 0
            case "argument", _, "=" if head.isidentifier():
                self._argument, self._value = head, PythonLiteral()
            case "argument" | ", or )", "", ")":
                return self._end_call()
            case ", or )", "", ",":
                self._wants = "argument"
            case ", or ]", "", ",":
                self._wants = "call"
            case ", or ]", "", "]":
                return Verdict.DONE
            case _:
                return Verdict.BROKEN
        return Verdict.HELD

    def _read_value(self, value: PythonLiteral, text: str, at: int) -> tuple[int, Verdict]:
        end = value.read(text, at)
        if not value.is_complete:
            return end, Verdict.BROKEN if end == at else Verdict.HELD
        if (as_json := value.as_json()) is None:
            return end, Verdict.BROKEN
        if not self._sent:
            self._calls.begin(self._name)
        self._calls.add(f"{', ' if self._sent else '{'}{json.dumps(self._argument)}: {as_json}")
        self._sent += 1
        self._value, self._wants = None, ", or )"
        return end, Verdict.SENT

    def _end_call(self) -> Verdict:
        if not self._sent:
            self._calls.begin(self._name)
        self._calls.add("}" if self._sent else "{}")
        self._wants = ", or ]"
        return Verdict.SENT
