"""A grammar is written down in the library's form: a list of named grammars, as JSON, of bounded size."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rota.core.errors import RequestError
from rota.core.grammar import Grammar

# Up to this size a grammar is read in milliseconds. Every row of a batch holds one.
MAX_CHARACTERS = 128 * 1024
# A text that a regular expression or an EBNF forces is spelled again with every token.
MAX_PATTERN = 16 * 1024


def lark(text: str, param: str) -> Grammar:
    """A text of a grammar in the library's own language."""
    return grammar_of({"lark_grammar": text}, param)


def grammar_of(part: Mapping[str, Any], param: str) -> Grammar:
    """One grammar by itself."""
    return Grammar(written([{"name": "answer", **part}], param), param)


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
