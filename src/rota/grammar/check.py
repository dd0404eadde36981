"""A grammar is tried with the model's tokens before a request with it is taken."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from random import Random
from typing import Any

from llguidance import LLMatcher

from rota.core.grammar import Grammar
from rota.grammar.grammars import Vocabulary, explained
from rota.grammar.schemas import Place, children, pointer

# The first tokens of one answer are drawn by chance: most grammars that get stuck or cost too much show it there.
TRIED_TOKENS = 32
# A schema that the library refuses is read again in parts, to name the place.
_MOST_PARTS = 200
_OWN_LINE = re.compile(r"at 1\(\d+\): ")


def problem(vocabulary: Vocabulary, grammar: Grammar) -> str:
    """Why answers cannot follow a grammar, in a sentence; empty if they can."""
    matcher = vocabulary.matcher(grammar)
    if error := explained(matcher.get_error()):
        return _located(vocabulary, grammar, error)
    return _tried(vocabulary, matcher)


def _tried(vocabulary: Vocabulary, matcher: LLMatcher) -> str:
    chance = Random(0)  # the same grammar has the same answer
    for count in range(TRIED_TOKENS):
        mask = matcher.compute_bitmask()
        if error := explained(matcher.get_error()):
            return f"{error} after {count} tokens of an answer." if count else f"{error} at the beginning of an answer."
        token = _drawn(mask, chance)
        if token in vocabulary.eos_ids:
            break
        matcher.consume_token(token)
    return ""


def _drawn(mask: bytes, chance: Random) -> int:
    """A token that a mask allows."""
    start = chance.randrange(len(mask))
    rest = mask[start:].lstrip(b"\0") or mask.lstrip(b"\0")
    lowest = (rest[0] & -rest[0]).bit_length() - 1
    return 8 * (len(mask) - len(rest)) + lowest


def _located(vocabulary: Vocabulary, grammar: Grammar, error: str) -> str:
    """The library's error, with its place if it lies in a JSON schema."""
    parts = json.loads(grammar.text)["grammars"]
    schemas = [part for part in parts if "json_schema" in part]
    for part in schemas:
        own = _error(vocabulary, part["json_schema"])
        if own and own in error:
            place = pointer(_place(vocabulary, part["json_schema"], own))
            which = part["name"].replace("_", " ") if len(schemas) > 1 else ""
            where = " ".join(filter(None, (which, place)))
            return f"at {where}: {own}." if where else f"{own}."
    # The line of a regular expression or a choice is not the client's.
    return f"{error if chr(10) in parts[0].get('lark_grammar', '') else _OWN_LINE.sub('', error)}."


def _error(vocabulary: Vocabulary, schema: dict[str, Any]) -> str:
    return explained(vocabulary.matcher(Grammar(json.dumps({"grammars": [{"json_schema": schema}]}))).get_error())


def _place(vocabulary: Vocabulary, schema: dict[str, Any], error: str) -> Place:
    """The innermost part of a schema that gives the same error by itself; the root if none does."""
    shared: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions", "x-guidance") if name in schema}
    place: Place = ()
    tries = iter(range(_MOST_PARTS))
    while step := _guilty(vocabulary, schema, shared, error, tries):
        steps, schema = step
        place += steps
    return place


def _guilty(
    vocabulary: Vocabulary, schema: dict[str, Any], shared: dict[str, Any], error: str, tries: Iterator[int]
) -> tuple[Place, dict[str, Any]] | None:
    for steps, part in children(schema):
        if not isinstance(part, dict) or next(tries, None) is None:
            continue
        if _error(vocabulary, {**shared, **part}) == error:
            return steps, part
    return None
