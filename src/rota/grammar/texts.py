"""What a client asks of an answer becomes a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal

from rota.core.errors import RequestError
from rota.core.grammar import Grammar
from rota.grammar.gbnf import ANY_TEXT, GbnfError, as_lark, is_gbnf, marker, quoted, spelled
from rota.grammar.schemas import MAX_LITERAL, library_schema

# ── written ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# A grammar is written down in the library's form: a list of named grammars, as JSON, of bounded size.

# Up to this size a grammar is read in milliseconds. Every row of a batch holds one.
MAX_CHARACTERS = 128 * 1024
# A text that a regular expression or an EBNF forces is spelled again with every token.
MAX_PATTERN = 16 * 1024


def lark(text: str, param: str) -> Grammar:
    """A text of a grammar in the library's own language."""
    return Grammar(written([{"name": "answer", "lark_grammar": text}], param), param)


def written(parts: Sequence[Mapping[str, Any]], param: str) -> str:
    """Grammars that may name each other; the first is the whole answer's. Raises RequestError if they are too large."""
    text = json.dumps({"grammars": parts}, ensure_ascii=False, separators=(",", ":"))
    check_size(text, param)
    try:
        text.encode()
    except UnicodeEncodeError:
        message = f"{param} holds half a surrogate pair, which is not Unicode; send the text without it."
        raise RequestError.bad_field(param, message) from None
    return text


def check_size(text: str, param: str, most: int = MAX_CHARACTERS) -> None:
    """Raises RequestError for a text that is too large to be read."""
    if len(text) > most:
        message = f"{param} makes a grammar of {len(text):,} characters; at most {most:,} are allowed."
        raise RequestError.bad_field(param, message)


# ── tags ────────────────────────────────────────────────────────────────────────────────────────────────────────────
# Tagged answers: text in which calls of tools, or other tagged parts, must match the schema of their tag.


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


__all__ = ["Tag", "after_thinking", "choice", "ebnf", "either", "json_object", "json_schema", "regex", "tagged"]


def json_schema(schema: Mapping[str, Any] | bool, param: str) -> Grammar:
    """JSON that meets a schema. Raises RequestError with the place of a keyword that cannot be kept."""
    return Grammar(written([{"name": "answer", "json_schema": library_schema(schema, param)}], param), param)


def json_object(param: str) -> Grammar:
    """Any JSON object."""
    return json_schema({"type": "object"}, param)


def regex(pattern: str, param: str) -> Grammar:
    """A text that matches a regular expression from its beginning to its end."""
    check_size(pattern, param, MAX_PATTERN)
    return lark(f"start: /{_within_slashes(pattern)}/" if pattern else 'start: ""', param)


def choice(options: Sequence[str], param: str) -> Grammar:
    """One of several texts."""
    if not options:
        raise RequestError.bad_field(param, f"{param} is empty; give at least one text to choose from.")
    if any(len(option) > MAX_LITERAL for option in options):
        raise RequestError.bad_field(param, f"{param} holds a text of more than {MAX_LITERAL:,} characters.")
    return lark(f"start: OPTION\nOPTION: {' | '.join(map(quoted, options))}", param)


def ebnf(text: str, param: str) -> Grammar:
    """A text of a context-free grammar: GBNF, which begins at `root`, or Lark, which begins at `start`."""
    check_size(text, param, MAX_PATTERN)
    try:
        return lark(as_lark(text) if is_gbnf(text) else text, param)
    except GbnfError as error:
        raise RequestError.bad_field(param, f"{param} is not GBNF: {error}.") from None


def either(one: Grammar, other: Grammar) -> Grammar:
    """An answer that matches one of two grammars."""
    head = {"name": "either", "lark_grammar": "start: @one | @other"}
    parts = _named(one, "one")
    others = _renamed(_named(other, "other"), {part["name"] for part in parts})
    return replace(one, text=written([head, *parts, *others], one.param))


def after_thinking(grammar: Grammar, end: str, specials: Mapping[str, int] | None = None, start: str = "") -> Grammar:
    """Any text up to `end`, then the grammar. With a `start`, only an answer that begins with it has such a text.

    `specials`: the ids of special tokens that `start` and `end` may hold, by name.
    """
    known = specials or {}
    thoughts = f"({spelled(start, known)} thought blanks?)?" if start else "thought blanks?"
    begins = "\n".join(
        (
            f"start: {thoughts} @answer",
            *marker("thought", end, known),
            "blanks: /[ \\n]{1,4}/",
            ANY_TEXT,
        )
    )
    parts = [{"name": "thinking", "lark_grammar": begins}, *_named(grammar, "answer")]
    return replace(grammar, text=written(parts, grammar.param))


def _named(grammar: Grammar, name: str) -> list[dict[str, Any]]:
    """The parts of a grammar, to be parts of another one that calls it by this name."""
    head, *others = json.loads(grammar.text)["grammars"]
    return [{**head, "name": name}, *others]


def _renamed(parts: list[dict[str, Any]], taken: Set[str]) -> list[dict[str, Any]]:
    """The same parts, in which a name that is taken is another one."""
    names = [part["name"] for part in parts if part["name"] in taken]
    if not names:
        return parts
    used = re.compile(rf"@({'|'.join(map(re.escape, names))})\b")
    return [
        {
            **part,
            "name": f"other_{part['name']}" if part["name"] in taken else part["name"],
            **({"lark_grammar": used.sub(r"@other_\1", part["lark_grammar"])} if "lark_grammar" in part else {}),
        }
        for part in parts
    ]


def _within_slashes(pattern: str) -> str:
    """A slash would end the pattern in Lark, and so would the end of a line."""
    escaped = {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}
    return re.sub(r"\\.|[/\n]", lambda found: escaped.get(found[0], found[0]), pattern, flags=re.DOTALL)
