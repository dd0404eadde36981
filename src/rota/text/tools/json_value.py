"""A JSON value is read as its text comes, a piece at a time, up to its end or its first fault."""

from __future__ import annotations

import re

# What ends blanks, the plain text of a string, and a number or a word.
SIGN = re.compile(r"[^ \t\n\r]")
_QUOTE = re.compile(r'["\\\x00-\x1f]')
_ATOM_END = re.compile(r"[^-+.0-9A-Za-z]")
_HEX = re.compile(r"[0-9A-Fa-f]{1,4}")
_WHOLE_ATOM = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_CLOSING = {"{": "}", "[": "]"}


class JsonValue:
    """Where the text of one value stands. Any split of a text into pieces is read the same."""

    def __init__(self) -> None:
        self.is_complete = False
        self.is_broken = False
        self._closing: list[str] = []  # of the objects and lists that are open
        self._wants = "value"
        self._within = ""  # "string", "escape", "hex" or "atom"
        self._atom = ""
        self._digits = 0  # that an escape still needs

    def read(self, text: str, at: int) -> int:
        """Read on from `at`. Gives where the value's end or fault is, or the text's end."""
        end = len(text)
        while at < end and not (self.is_complete or self.is_broken):
            within = self._within
            if within == "string":
                at = self._read_string(text, at)
            elif not within:
                at = self._read_sign(text, at)
            elif within == "atom":
                at = self._read_atom(text, at)
            else:
                at = self._read_escape(text, at)
        return at

    def _read_string(self, text: str, at: int) -> int:
        found = _QUOTE.search(text, at)
        if not found:
            return len(text)
        at, sign = found.start(), found[0]
        if sign == "\\":
            self._within = "escape"
        elif sign == '"':
            self._within = ""
            if self._wants == "key":
                self._wants = ":"
            else:
                self._end_value()
        else:
            return self._break(at)
        return at + 1

    def _read_escape(self, text: str, at: int) -> int:
        if self._within == "hex":
            found = _HEX.match(text, at, at + self._digits)
            if not found:
                return self._break(at)
            self._digits -= len(found[0])
            self._within = "hex" if self._digits else "string"
            return found.end()
        if text[at] not in '"\\/bfnrtu':
            return self._break(at)
        self._within, self._digits = ("hex", 4) if text[at] == "u" else ("string", 0)
        return at + 1

    def _read_atom(self, text: str, at: int) -> int:
        """A number or a word. What follows tells its end, so only then is it checked."""
        found = _ATOM_END.search(text, at)
        end = found.start() if found else len(text)
        self._atom += text[at:end]
        if found:
            if not _WHOLE_ATOM.fullmatch(self._atom):
                return self._break(end)
            self._within = self._atom = ""
            self._end_value()
        return end

    def _read_sign(self, text: str, at: int) -> int:
        found = SIGN.search(text, at)
        if not found:
            return len(text)
        at, sign, wants = found.start(), found[0], self._wants
        if wants.startswith("value"):
            return self._begin_value(sign, at)
        if wants == ":" == sign:
            self._wants = "value"
        elif wants.startswith("key") and sign == '"':
            self._wants, self._within = "key", "string"
        elif wants == "," == sign:
            self._wants = "key" if self._closing[-1] == "}" else "value"
        elif wants in (",", "key or }") and sign == self._closing[-1]:
            self._close()
        else:
            return self._break(at)
        return at + 1

    def _begin_value(self, sign: str, at: int) -> int:
        if sign in _CLOSING:
            self._closing.append(_CLOSING[sign])
            self._wants = "key or }" if sign == "{" else "value or ]"
        elif sign == '"':
            self._wants, self._within = "value", "string"
        elif sign == "]" and self._wants == "value or ]":
            self._close()
        elif sign in "-0123456789tfn":
            self._within = "atom"
            return at
        else:
            return self._break(at)
        return at + 1

    def _close(self) -> None:
        self._closing.pop()
        self._end_value()

    def _end_value(self) -> None:
        self._wants = ","
        self.is_complete = not self._closing

    def _break(self, at: int) -> int:
        self.is_broken = True
        return at
