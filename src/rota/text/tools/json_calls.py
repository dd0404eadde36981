"""Calls as JSON objects with a name and arguments: bare, in a list, or behind the tags of a family."""

from __future__ import annotations

import json
import re

from rota.text.tools.parser import Calls, CallVerdict

# ── json value ──────────────────────────────────────────────────────────────────────────────────────────────────────
# A JSON value is read as its text comes, a piece at a time, up to its end or its first fault.

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


# ── json calls ──────────────────────────────────────────────────────────────────────────────────────────────────────
# Calls as JSON objects with a name and arguments: one object, or a list of them.

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

    def read(self, text: str, at: int) -> tuple[int, CallVerdict]:
        """Read one thing from `at` on. Gives where it ends."""
        if self._object is None:
            return self._read_sign(text, at)
        at, verdict = self._object.read(text, at)
        if verdict is CallVerdict.DONE:
            self._object, self._wants = None, ", or ]"
            verdict = CallVerdict.SENT if self._is_list else CallVerdict.DONE
        return at, verdict

    def _read_sign(self, text: str, at: int) -> tuple[int, CallVerdict]:
        sign = text[at]
        if sign in " \t\n\r":
            return at + 1, CallVerdict.HELD
        if sign == "{" and self._wants.startswith("call"):
            self._object = _CallObject(self._calls)
        elif sign == "[" and self._wants == "call or [":
            self._wants, self._is_list = "call", True
        elif sign == "," and self._wants == ", or ]":
            self._wants = "call"
        elif sign == "]" and self._wants == ", or ]":
            return at + 1, CallVerdict.DONE
        else:
            return at, CallVerdict.BROKEN
        return at + 1, CallVerdict.HELD


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

    def read(self, text: str, at: int) -> tuple[int, CallVerdict]:
        if self._value is None:
            return self._read_sign(text, at)
        end = self._value.read(text, at)
        if end == at and not self._value.is_complete:
            return at, CallVerdict.BROKEN
        verdict = self._take(text[at:end])
        if self._value.is_complete:
            self._value = None
            return end, verdict if self._end_value() else CallVerdict.BROKEN
        return end, verdict

    def _read_sign(self, text: str, at: int) -> tuple[int, CallVerdict]:
        found = SIGN.search(text, at)
        if not found:
            return len(text), CallVerdict.HELD
        at, sign, wants = found.start(), found[0], self._wants
        if wants == "value":
            return self._begin_value(sign, at)
        if wants == ":" == sign:
            self._wants = "value"
        elif wants.startswith("key") and sign == '"':
            self._value, self._wants = JsonValue(), "key"
            return at, CallVerdict.HELD
        elif wants == ", or }" and sign == ",":
            self._wants = "key"
        elif sign == "}" and wants in (", or }", "key or }") and self._begin():
            return at + 1, CallVerdict.DONE
        else:
            return at, CallVerdict.BROKEN
        return at + 1, CallVerdict.HELD

    def _begin_value(self, sign: str, at: int) -> tuple[int, CallVerdict]:
        if sign not in ('{"' if self._key == "arguments" else '"'):
            return at, CallVerdict.BROKEN
        self._value = JsonValue()
        if self._key == "arguments" and sign == "{" and "name" in self._known:
            self._calls.begin(self._known["name"])
            self._is_begun = True
            return at, CallVerdict.SENT
        return at, CallVerdict.HELD

    def _take(self, piece: str) -> CallVerdict:
        if self._is_sending:
            self._calls.add(piece)
            return CallVerdict.SENT
        self._pieces.append(piece)
        return CallVerdict.HELD

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


# ── tagged calls ────────────────────────────────────────────────────────────────────────────────────────────────────
# Calls between tags: JSON, then the tag that ends them.


class TaggedCalls:
    """Reads what follows the first tag."""

    def __init__(self, calls: Calls, end: str) -> None:
        self._json: JsonCalls | None = JsonCalls(calls)
        self._end = end
        self._matched = 0  # characters of the end that have been read

    def read(self, text: str, at: int) -> tuple[int, CallVerdict]:
        if self._json is None:
            return self._read_end(text[at], at)
        at, verdict = self._json.read(text, at)
        if verdict is CallVerdict.DONE:
            self._json, verdict = None, CallVerdict.SENT
        return at, verdict

    def _read_end(self, sign: str, at: int) -> tuple[int, CallVerdict]:
        if not self._matched and sign in " \t\n\r":
            return at + 1, CallVerdict.HELD
        if sign != self._end[self._matched]:
            return at, CallVerdict.BROKEN
        self._matched += 1
        return at + 1, CallVerdict.DONE if self._matched == len(self._end) else CallVerdict.HELD


# ── mistral calls ───────────────────────────────────────────────────────────────────────────────────────────────────
# Mistral's calls behind their tag: a list of JSON objects, or in newer models a name and its arguments.

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

    def read(self, text: str, at: int) -> tuple[int, CallVerdict]:
        if self._list:
            return self._list.read(text, at)
        if self._arguments:
            return self._read_arguments(self._arguments, text, at)
        if not self._head.strip() and text[at] in "[{":
            self._list = JsonCalls(self._calls)
            return at, CallVerdict.HELD
        return self._read_head(text, at)

    def _read_head(self, text: str, at: int) -> tuple[int, CallVerdict]:
        # A character at a time until the name begins: what follows blanks decides between the two forms.
        room = _MAX_HEAD - len(self._head) if self._head.strip() else 1
        found = _HEAD.match(text, at, min(len(text), at + room))
        if found and found[0]:
            self._head += found[0]
            return found.end(), CallVerdict.HELD
        whole = _WHOLE_HEAD.fullmatch(self._head)
        if text[at] != "{" or not whole or whole[1] not in self._calls.names:
            return at, CallVerdict.BROKEN
        self._calls.begin(whole[1])
        self._arguments = JsonValue()
        return at, CallVerdict.SENT

    def _read_arguments(self, arguments: JsonValue, text: str, at: int) -> tuple[int, CallVerdict]:
        end = arguments.read(text, at)
        if end > at:
            self._calls.add(text[at:end])
        if arguments.is_complete:
            return end, CallVerdict.DONE
        return end, CallVerdict.SENT if end > at else CallVerdict.BROKEN
