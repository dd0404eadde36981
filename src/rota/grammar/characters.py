"""Characters as GBNF writes them, alone and in sets."""

from __future__ import annotations

import re
from collections.abc import Iterator

_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))|(.)", re.DOTALL)
_NAMED = {"n": "\n", "r": "\r", "t": "\t", "0": "\0"}
# Letters that stand for a set of characters inside a set.
_SETS = frozenset("dwsDWS")


def text_of(written: str) -> str:
    """The characters that a text between quotes stands for. Raises ValueError for an escape that has no meaning."""
    return "".join(_character(found) for found in _ESCAPE.finditer(written))


def character_class(written: str) -> str:
    """A regular expression for a set of characters between brackets. Raises ValueError if it has no meaning."""
    is_excluding = written.startswith("^")
    items = list(_items(written.removeprefix("^")))
    if not items:
        if is_excluding:
            return "(.|\\n)"
        raise ValueError("is an empty set")
    return f"[{'^' if is_excluding else ''}{''.join(items)}]"


def _items(written: str) -> Iterator[str]:
    """Single characters, ranges, and sets with a letter of their own. A dash at either end is a dash."""
    pieces = list(_ESCAPE.finditer(written))
    at = 0
    while at < len(pieces):
        if pieces[at][4] in _SETS and pieces[at][4]:
            yield pieces[at][0]
            at += 1
        elif at + 2 < len(pieces) and pieces[at + 1][5] == "-":
            first, last = _character(pieces[at]), _character(pieces[at + 2])
            if first > last:
                raise ValueError(f"has a range that ends before it begins, {first}-{last}")
            yield f"{_code(first)}-{_code(last)}"
            at += 3
        else:
            yield _code(_character(pieces[at]))
            at += 1


def _character(found: re.Match[str]) -> str:
    by_number = found[1] or found[2] or found[3]
    if by_number:
        number = int(by_number, 16)
        if number > 0x10FFFF or 0xD800 <= number < 0xE000:
            raise ValueError(f"has {found[0]}, which is no character")
        return chr(number)
    if found[4] is None:
        return found[5]
    if found[4] in _NAMED:
        return _NAMED[found[4]]
    if found[4].isalnum():
        raise ValueError(f"has {found[0]}, which has no meaning")
    return found[4]


def _code(character: str) -> str:
    return f"\\x{{{ord(character):x}}}"
