"""Matchers over a vocabulary of bytes: what a grammar takes, and answers drawn from its masks by chance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp

import jsonschema

from rota.core.grammar import Grammar
from rota.grammar.grammars import LlGrammars, LlMatcher
from rota.text.tokenizer import Tokenizer
from tests.tiny_tokenizer import write_byte_tokenizer

END = 2
# The model's vocabulary is padded beyond the tokenizer's 256 tokens.
VOCABULARY = 300
WORDS = 10


@cache
def byte_grammars() -> LlGrammars:
    return LlGrammars(lambda: Tokenizer(write_byte_tokenizer(Path(mkdtemp()))), VOCABULARY)


def takes(grammar: Grammar, text: str) -> bool:
    """Whether a text is a whole answer."""
    matcher = byte_grammars().matcher(grammar)
    matcher.accept(list(text.encode()))
    return not matcher.fault and END in allowed(matcher)


def begins(grammar: Grammar, text: str) -> bool:
    """Whether an answer may begin with a text."""
    matcher = byte_grammars().matcher(grammar)
    matcher.accept(list(text.encode()))
    return not matcher.fault


def allowed(matcher: LlMatcher, grammars: LlGrammars | None = None, vocabulary: int = VOCABULARY) -> set[int]:
    """The tokens that a matcher's mask allows."""
    words = -(-vocabulary // 32)
    raw = bytearray(4 * words)
    (grammars or byte_grammars()).fill([(matcher, 0)], memoryview(raw).cast("I", (1, words)))
    return {token for token in range(32 * words) if raw[token // 8] >> token % 8 & 1}


@dataclass(frozen=True, slots=True)
class Drawn:
    """An answer drawn by chance. `is_whole`: it ended by itself."""

    text: str
    is_whole: bool


def drawn(grammar: Grammar, chance: Random, most: int = 400, ends: float = 0.3) -> Drawn:
    """One answer of at most `most` tokens. Where an answer may end, it does so with probability `ends`."""
    matcher = byte_grammars().matcher(grammar)
    tokens: list[int] = []
    for token in _tokens(matcher, chance, ends):
        if token == END:
            return Drawn(_text(tokens), is_whole=True)
        tokens.append(token)
        if len(tokens) == most:
            break
    return Drawn(_text(tokens), is_whole=False)


def _tokens(matcher: LlMatcher, chance: Random, ends: float) -> Iterator[int]:
    while True:
        tokens = allowed(matcher)
        assert not matcher.fault, matcher.fault
        token = END if END in tokens and chance.random() < ends else chance.choice(sorted(tokens))
        matcher.accept([token])
        yield token


def _text(tokens: list[int]) -> str:
    """A cut answer may end within a character."""
    return bytes(tokens).decode("utf-8", "ignore")


# RFC 3339 lets a second be 60, and grammars do. The checks of times, where their package is installed, do not.
FORMATS = jsonschema.FormatChecker(set(jsonschema.FormatChecker.checkers) - {"date-time", "time"})
