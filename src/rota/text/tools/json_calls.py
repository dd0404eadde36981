"""Calls as JSON objects with a name and arguments: one object, or a list of them."""

from __future__ import annotations

import json

from rota.text.tools.calls import Calls, Verdict
from rota.text.tools.json_value import SIGN, JsonValue

_ARGUMENTS = ("arguments", "parameters")
# What models write beside a call, and what changes nothing about it.
_NOTES = ("type", "id")


class JsonCalls:
    """Reads one call, or a list of calls in brackets."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._object: _CallObject | None = None
        self._wants = "call or ["
        self._is_list = False

    def read(self, text: str, at: int) -> tuple[int, Verdict]:
        """Read one thing from `at` on. Gives where it ends."""
        if self._object is None:
            return self._read_sign(text, at)
        at, verdict = self._object.read(text, at)
        if verdict is Verdict.DONE:
            self._object, self._wants = None, ", or ]"
            verdict = Verdict.SENT if self._is_list else Verdict.DONE
        return at, verdict

    def _read_sign(self, text: str, at: int) -> tuple[int, Verdict]:
        sign = text[at]
        if sign in " \t\n\r":
            return at + 1, Verdict.HELD
        if sign == "{" and self._wants.startswith("call"):
            self._object = _CallObject(self._calls)
        elif sign == "[" and self._wants == "call or [":
            self._wants, self._is_list = "call", True
        elif sign == "," and self._wants == ", or ]":
            self._wants = "call"
        elif sign == "]" and self._wants == ", or ]":
            return at + 1, Verdict.DONE
        else:
            return at, Verdict.BROKEN
        return at + 1, Verdict.HELD


class _CallObject:
    """Reads one object behind its brace. Its arguments are sent as they come, once its name is known."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._wants = "key or }"
        self._value: JsonValue | None = None
        self._pieces: list[str] = []  # of the value that is read, if it is not sent
        self._key = ""
        self._known: dict[str, str] = {}
        self._is_begun = False

    def read(self, text: str, at: int) -> tuple[int, Verdict]:
        if self._value is None:
            return self._read_sign(text, at)
        end = self._value.read(text, at)
        if end == at and not self._value.is_complete:
            return at, Verdict.BROKEN
        verdict = self._take(text[at:end])
        if self._value.is_complete:
            self._value = None
            return end, verdict if self._end_value() else Verdict.BROKEN
        return end, verdict

    def _read_sign(self, text: str, at: int) -> tuple[int, Verdict]:
        found = SIGN.search(text, at)
        if not found:
            return len(text), Verdict.HELD
        at, sign, wants = found.start(), found[0], self._wants
        if wants == "value":
            return self._begin_value(sign, at)
        if wants == ":" == sign:
            self._wants = "value"
        elif wants.startswith("key") and sign == '"':
            self._value, self._wants = JsonValue(), "key"
            return at, Verdict.HELD
        elif wants == ", or }" and sign == ",":
            self._wants = "key"
        elif sign == "}" and wants in (", or }", "key or }") and self._begin():
            return at + 1, Verdict.DONE
        else:
            return at, Verdict.BROKEN
        return at + 1, Verdict.HELD

    def _begin_value(self, sign: str, at: int) -> tuple[int, Verdict]:
        if sign not in ('{"' if self._key == "arguments" else '"'):
            return at, Verdict.BROKEN
        self._value = JsonValue()
        if self._key == "arguments" and sign == "{" and "name" in self._known:
            self._calls.begin(self._known["name"])
            self._is_begun = True
            return at, Verdict.SENT
        return at, Verdict.HELD

    def _take(self, piece: str) -> Verdict:
        if self._is_sending:
            self._calls.add(piece)
            return Verdict.SENT
        self._pieces.append(piece)
        return Verdict.HELD

    @property
    def _is_sending(self) -> bool:
        return self._is_begun and self._key == "arguments" and self._wants == "value"

    def _end_value(self) -> bool:
        """Whether the key or value that has been read belongs to a call."""
        text, self._pieces = "".join(self._pieces), []
        if self._wants == "key":
            key = json.loads(text)
            self._key, self._wants = "arguments" if key in _ARGUMENTS else key, ":"
            return self._key not in self._known and self._key in ("name", "arguments", *_NOTES)
        self._wants = ", or }"
        self._known[self._key] = text if text.startswith("{") or not text else json.loads(text)
        return self._key != "name" or self._known["name"] in self._calls.names

    def _begin(self) -> bool:
        """At the object's end: send a call whose name came last, or that has no arguments."""
        if self._is_begun:
            return True
        arguments = self._known.get("arguments", "{}") or "{}"
        if "name" not in self._known or not _is_object(arguments):
            return False
        self._calls.begin(self._known["name"])
        self._calls.add(arguments)
        return True


def _is_object(text: str) -> bool:
    """Arguments may come as a text that holds JSON. Its escapes may spell what is no Unicode."""
    value = JsonValue()
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return text.startswith("{") and value.read(text, 0) == len(text) and value.is_complete
