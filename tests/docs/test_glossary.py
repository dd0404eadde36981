"""The glossary has every word once, and the code has every word of the glossary."""

from __future__ import annotations

import io
import keyword
import re
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from docs.generate.pages import DOCS

PACKAGE = DOCS.parent / "src/rota"
GLOSSARY = (DOCS / "glossary.md").read_text("utf-8")
# - **word**: A sentence or two. (`where/it/lives.py`)
ENTRIES = re.findall(r"^- \*\*([^*]+)\*\*: (.+?) \(`([^`]+)`\)$", " ".join(GLOSSARY.split("\n  ")), re.M)


@cache
def words_of(module: Path) -> frozenset[str]:
    """The words that the names in a module are made of, its own name included: `SlotLedger` has slot and ledger."""
    tokens = tokenize.generate_tokens(io.StringIO(module.read_text("utf-8")).readline)
    names = {token.string for token in tokens if token.type == tokenize.NAME} - {*keyword.kwlist} | {module.stem}
    return frozenset(word.lower() for name in names for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name))


def test_every_entry_is_a_word_a_sentence_and_a_place():
    assert len(ENTRIES) == len(re.findall(r"^- ", GLOSSARY, re.M))
    assert [word for word, meaning, _ in ENTRIES if not meaning.endswith((".", "?", '".'))] == []


def test_every_word_is_there_once():
    assert [word for word, count in Counter(word for word, _, _ in ENTRIES).items() if count > 1] == []


@pytest.mark.parametrize(("word", "place"), [(word, place) for word, _, place in ENTRIES])
def test_a_word_is_part_of_a_name_where_the_glossary_says_it_lives(word, place):
    there = words_of(PACKAGE / place)
    missing = [part for part in word.lower().split() if part != "and" and not {part, f"{part}s"} & there]
    assert not missing, f"no name in {place} has {missing} of '{word}'"
