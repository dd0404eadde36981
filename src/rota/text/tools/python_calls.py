"""Calls as Python writes them: `[weather(city="Rome", days=2), clock()]`."""

from __future__ import annotations

import ast
import json
import re
import warnings

from rota.text.tools.parser import Calls, CallVerdict

# ── python literal ──────────────────────────────────────────────────────────────────────────────────────────────────
# A Python literal is read as its text comes, up to the comma or the bracket behind it.

_UNQUOTED = re.compile(r"""[^"'\\()\[\]{},]*""")
_QUOTED = {quote: re.compile(rf"[^{quote}\\]*") for quote in "\"'"}
_CLOSING = {"(": ")", "[": "]", "{": "}"}
# Far deeper than arguments are, and far less than what Python's parser can take.
_MAX_DEPTH = 50


class PythonLiteral:
    """The value of one argument of a call."""

    def __init__(self) -> None:
        self.is_complete = False
        self._is_broken = False
        self._pieces: list[str] = []
        self._closing: list[str] = []  # of the brackets that are open
        self._quote = ""  # of the string that is open
        self._is_escaped = False

    def read(self, text: str, at: int) -> int:
        """Read on from `at`. Gives where the value's end or fault is, or the text's end."""
        start = at
        while at < len(text) and not (self.is_complete or self._is_broken):
            at = self._read_string(text, at) if self._quote else self._read_sign(text, at)
        self._pieces.append(text[start:at])
        return at

    def as_json(self) -> str | None:
        """The value as JSON. None: it is no value that JSON has."""
        text = "".join(self._pieces).strip()
        for read in (json.loads, _literal):  # most values are written the same in both, and JSON is read faster
            try:
                return json.dumps(read(text), allow_nan=False)
            except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                continue
        return None

    def _read_string(self, text: str, at: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        if found := _QUOTED[self._quote].match(text, at):
            at = found.end()
        if at == len(text):
            return at
        if text[at] == "\\":
            self._is_escaped = True
        else:
            self._quote = ""
        return at + 1

    def _read_sign(self, text: str, at: int) -> int:
        if found := _UNQUOTED.match(text, at):
            at = found.end()
        if at == len(text):
            return at
        sign = text[at]
        if not self._closing and sign in ",)":
            self.is_complete = True
            return at
        if sign in _QUOTED:
            self._quote = sign
        elif sign in _CLOSING and len(self._closing) < _MAX_DEPTH:
            self._closing.append(_CLOSING[sign])
        elif self._closing and sign == self._closing[-1]:
            self._closing.pop()
        elif sign != ",":
            self._is_broken = True
            return at
        return at + 1


def _literal(text: str) -> object:
    with warnings.catch_warnings(action="ignore"):  # models write escapes that Python does not know
        return ast.literal_eval(text)


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

    def read(self, text: str, at: int) -> tuple[int, CallVerdict]:
        """Read one thing from `at` on. Gives where it ends."""
        if self._value:
            return self._read_value(self._value, text, at)
        found = _HEAD.match(text, at, min(len(text), at + _MAX_HEAD - len(self._head)))
        if found and found[0]:
            self._head += found[0]
            return found.end(), CallVerdict.HELD
        head, self._head = self._head.strip(), ""
        verdict = self._read_sign(head, text[at])
        return at if verdict is CallVerdict.BROKEN else at + 1, verdict

    def _read_sign(self, head: str, sign: str) -> CallVerdict:
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
                return CallVerdict.DONE
            case _:
                return CallVerdict.BROKEN
        return CallVerdict.HELD

    def _read_value(self, value: PythonLiteral, text: str, at: int) -> tuple[int, CallVerdict]:
        end = value.read(text, at)
        if not value.is_complete:
            return end, CallVerdict.BROKEN if end == at else CallVerdict.HELD
        if (as_json := value.as_json()) is None:
            return end, CallVerdict.BROKEN
        if not self._sent:
            self._calls.begin(self._name)
        self._calls.add(f"{', ' if self._sent else '{'}{json.dumps(self._argument)}: {as_json}")
        self._sent += 1
        self._value, self._wants = None, ", or )"
        return end, CallVerdict.SENT

    def _end_call(self) -> CallVerdict:
        if not self._sent:
            self._calls.begin(self._name)
        self._calls.add("}" if self._sent else "{}")
        self._wants = ", or ]"
        return CallVerdict.SENT
