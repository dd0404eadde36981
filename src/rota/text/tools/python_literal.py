"""A Python literal is read as its text comes, up to the comma or the bracket behind it."""

from __future__ import annotations

import ast
import json
import re
import warnings

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
