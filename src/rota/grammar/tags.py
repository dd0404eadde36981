"""Tagged answers: text in which calls of tools, or other tagged parts, must match the schema of their tag."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rota.core.grammar import Grammar
from rota.grammar.lark import ANY_TEXT, marker, spelled
from rota.grammar.schemas import library_schema
from rota.grammar.written import written


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """JSON between two texts. `begin` starts with `trigger`, at which free text turns into the tag."""

    begin: str
    schema: Mapping[str, Any] | bool
    end: str
    trigger: str

    def __post_init__(self) -> None:
        assert self.trigger, "a trigger that is empty would stand everywhere"
        assert self.begin.startswith(self.trigger), "free text turns into the tag at its trigger"


def tagged(
    tags: Sequence[Tag],
    param: str,
    *,
    at_least: Literal[0, 1] = 0,
    at_most: Literal[1] | None = None,
    text_between: bool = True,
    specials: Mapping[str, int] | None = None,
) -> Grammar:
    """An answer with tagged parts. `text_between`: free text may stand before, between and behind them.

    Behind the last part that is allowed, free text cannot hold a trigger. `specials`: ids by name of special tokens
    that stand in the tags' texts.
    """
    assert tags, "a grammar needs a tag"
    rules = _free_rules if text_between else _bare_rules
    calls = {"name": "answer", "lark_grammar": "\n".join(rules(tags, at_least, at_most, specials or {}))}
    schemas = [
        {"name": _schema(number), "json_schema": library_schema(tag.schema, param)} for number, tag in enumerate(tags)
    ]
    return Grammar(written([calls, *schemas], param), param)


def _free_rules(tags: Sequence[Tag], at_least: int, at_most: int | None, specials: Mapping[str, int]) -> Iterator[str]:
    triggers = list(dict.fromkeys(tag.trigger for tag in tags))
    if at_most is None:
        yield f"start: call{'+' if at_least else '*'} TEXT"
    else:
        yield "start: call LAST" if at_least else "start: call LAST | TEXT"
        yield f"LAST: {' & '.join(['TEXT', *map(_without, triggers)])}"
    yield f"call: {' | '.join(f'call_{index}' for index in range(len(triggers)))}"
    for index, trigger in enumerate(triggers):
        own = [number for number, tag in enumerate(tags) if tag.trigger == trigger]
        yield from marker(f"head_{index}", trigger, specials)
        yield f"call_{index}: head_{index} ({' | '.join(f'body_{number}' for number in own)})"
    for number, tag in enumerate(tags):
        yield f"body_{number}: {_body(number, tag.begin.removeprefix(tag.trigger), tag.end, specials)}"
    yield ANY_TEXT


def _bare_rules(tags: Sequence[Tag], at_least: int, at_most: int | None, specials: Mapping[str, int]) -> Iterator[str]:
    calls = 'call ("\\n"? call)*' if at_most is None else "call"
    yield f"start: {calls}" if at_least else f'start: {calls} | ""'
    yield f"call: {' | '.join(f'body_{number}' for number in range(len(tags)))}"
    for number, tag in enumerate(tags):
        yield f"body_{number}: {_body(number, tag.begin, tag.end, specials)}"


def _body(number: int, begin: str, end: str, specials: Mapping[str, int]) -> str:
    return " ".join(filter(None, (spelled(begin, specials), f"@{_schema(number)}", spelled(end, specials))))


def _schema(number: int) -> str:
    return f"tag_{number}"


def _without(text: str) -> str:
    """A terminal that matches what does not hold the text."""
    literally = "".join(f"\\x{{{ord(character):x}}}" for character in text)
    return f"~/(.|\\n)*{literally}(.|\\n)*/"
