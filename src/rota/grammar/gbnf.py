"""GBNF, the EBNF of llama.cpp and xgrammar, becomes Lark.

Both languages have the same operators, so a rule is translated token by token. What differs are the names: in Lark a
terminal, which is read as one regular expression, has capital letters. A rule without recursion becomes a terminal. If
all rules are such, so is the whole grammar; if not, a terminal reads as many characters as it can.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

# ── lark ────────────────────────────────────────────────────────────────────────────────────────────────────────────
# Pieces of the Lark dialect that the grammar library reads.

# It may be empty. Special tokens are not text, so they never match it.
ANY_TEXT = "TEXT: /(.|\\n)*/"


def quoted(text: str) -> str:
    """A literal text."""
    return json.dumps(text, ensure_ascii=False)


def spelled(text: str, specials: Mapping[str, int]) -> str:
    """A literal text in which the names of special tokens stand for those tokens. `specials`: ids by name."""
    if not specials:
        return quoted(text) if text else ""
    names = "|".join(re.escape(name) for name in sorted(specials, key=len, reverse=True))
    parts = re.split(f"({names})", text)
    return " ".join(f"<[{specials[part]}]>" if part in specials else quoted(part) for part in parts if part)


def marker(rule: str, text: str, specials: Mapping[str, int]) -> Iterator[str]:
    """Rules for any text up to a marker, with the marker. The first time that the marker comes, the text is over."""
    if text in specials:
        yield f"{rule}: TEXT {spelled(text, specials)}"
    else:
        yield f"{rule}[lazy]: TEXT {quoted(text)}"


# ── characters ──────────────────────────────────────────────────────────────────────────────────────────────────────
# Characters as GBNF writes them, alone and in sets.

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


_HEAD = re.compile(r"^[ \t]*[A-Za-z_][\w.-]*\s*::=", re.MULTILINE)
_TOKEN = re.compile(
    r"""(?P<blank>(?:\s|\#[^\n]*)+)
    |(?P<head>[A-Za-z_][\w.-]*\s*::=)
    |(?P<name>[A-Za-z_][\w.-]*)
    |(?P<text>"(?:[^"\\\n]|\\.)*")
    |(?P<set>\[(?:[^\]\\]|\\.)*\])
    |(?P<times>\{\s*\d+\s*(?:,\s*\d*\s*)?\})
    |(?P<mark>[|()*+?.])""",
    re.VERBOSE,
)
_ROOT = "root"
# What an empty alternative stands between.
_EDGES = ("", "|", "(")


class GbnfError(ValueError):
    """A text is not GBNF."""


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of the text, and what it is: the name of a group of the pattern above."""

    kind: str
    text: str


Rules = Mapping[str, Sequence[Token]]


def is_gbnf(text: str) -> bool:
    return _HEAD.search(text) is not None


def as_lark(text: str) -> str:
    """The same grammar. Raises GbnfError."""
    rules = _rules(text)
    if _ROOT not in rules:
        raise GbnfError("there is no rule 'root', with which an answer begins")
    _check_names(rules)
    terminals = _terminals(rules)
    names = {name: _lark_name(name, number, name in terminals) for number, name in enumerate(rules)}
    lines = (f"{names[name]}: {' '.join(_translated(name, tokens, names))}" for name, tokens in rules.items())
    return "\n".join([f"start: {names[_ROOT]}", *lines])


def _rules(text: str) -> dict[str, list[Token]]:
    """The tokens of each rule. A rule ends where the next begins."""
    rules: dict[str, list[Token]] = {}
    current: list[Token] | None = None
    for token in _tokens(text):
        if token.kind == "head":
            name = token.text.removesuffix("::=").strip()
            if name in rules:
                raise GbnfError(f"there are two rules '{name}'")
            current = rules[name] = []
        elif current is None:
            raise GbnfError(f"'{token.text[:40]}' stands before the first rule")
        else:
            current.append(token)
    return rules


def _tokens(text: str) -> Iterator[Token]:
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
            raise GbnfError(f"'{text[at : at + 20]}', in line {line} at column {column}, cannot be read")
        at = found.end()
        if found.lastgroup and found.lastgroup != "blank":
            yield Token(found.lastgroup, found[0])


def _named(tokens: Sequence[Token]) -> set[str]:
    return {token.text for token in tokens if token.kind == "name"}


def _check_names(rules: Rules) -> None:
    for name, tokens in rules.items():
        if unknown := _named(tokens) - rules.keys():
            raise GbnfError(f"rule '{name}' names '{min(unknown)}', and there is no such rule")


def _terminals(rules: Rules) -> set[str]:
    """The rules without recursion."""
    order = TopologicalSorter({name: _named(tokens) for name, tokens in rules.items()})
    with suppress(CycleError):  # the rules of a circle, and those that name them, are never ready
        order.prepare()
    found: set[str] = set()
    while ready := order.get_ready():
        found.update(ready)
        order.done(*ready)
    return found


def _lark_name(name: str, number: int, is_terminal: bool) -> str:
    """Its own for each rule: Lark knows fewer characters, and capitals have a meaning."""
    plain = f"r_{re.sub(r'[^A-Za-z0-9]', '_', name)}_{number}"
    return plain.upper() if is_terminal else plain.lower()


def _translated(rule: str, tokens: Sequence[Token], names: Mapping[str, str]) -> Iterator[str]:
    depth, before = 0, ""
    for token in tokens:
        if token.text in ("|", ")") and before in _EDGES:
            yield '""'
        if token.kind in ("mark", "times") and token.text[0] in "*+?{" and before in _EDGES:
            raise GbnfError(f"in rule '{rule}' nothing stands before '{token.text}'")
        depth += (token.text == "(") - (token.text == ")")
        if depth < 0:
            raise GbnfError(f"in rule '{rule}' a parenthesis is closed that is not open")
        yield _piece(rule, token, names)
        before = token.text if token.kind == "mark" else token.kind
    if depth:
        raise GbnfError(f"in rule '{rule}' a parenthesis is not closed")
    if before in _EDGES:
        yield '""'


def _piece(rule: str, token: Token, names: Mapping[str, str]) -> str:
    try:
        match token.kind:
            case "name":
                return names[token.text]
            case "text":
                return quoted(text_of(token.text[1:-1]))
            case "set":
                return f"/{character_class(token.text[1:-1])}/"
    except ValueError as error:
        raise GbnfError(f"in rule '{rule}' {token.text[:40]} {error}") from None
    return "/(.|\\n)/" if token.text == "." else token.text.replace(" ", "")
