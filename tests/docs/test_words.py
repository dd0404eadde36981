"""Sentences in code and pages are plain: few pronouns that stand for no noun, no longer than they were, and wrapped."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from docs.generate.pages import DOCS, TEMPLATES
from docs.generate.wrap import too_long
from tests.docs.sentences import (
    code_paragraphs,
    docs_paragraphs,
    mean_sentence,
    paragraphs,
    prose_lines,
    sentences_of,
    src_paragraphs,
    words_of,
)

ROOT = DOCS.parent
PRONOUNS = re.compile(r"\b(whoever|whom|somebody|nobody|everybody|anybody)\b", re.IGNORECASE)
MOST_PRONOUNS = 40
TEXTS = {".py", ".md", ".js", ".css", ".html", ".toml", ".json"}

# What `mean_sentence` gave for commit d9ba411, before the plain words; for both together it was 13.60.
MEAN_SENTENCE_BEFORE = {src_paragraphs: 12.93, docs_paragraphs: 16.44}

PAGES = [ROOT / "README.md", *sorted(page for page in DOCS.rglob("*.md") if TEMPLATES not in page.parents)]


def pronouns_by_file() -> Counter[str]:
    found: Counter[str] = Counter()
    for folder in (ROOT / "src", DOCS):
        for path in folder.rglob("*"):
            if path.suffix in TEXTS and path.is_file():
                found[str(path.relative_to(ROOT))] += len(PRONOUNS.findall(path.read_text("utf-8")))
    return found


def test_pronouns_that_stand_for_no_noun_are_rare_in_code_and_pages():
    found = pronouns_by_file()

    assert found.total() < MOST_PRONOUNS, found.most_common(20)


@pytest.mark.parametrize("paragraphs_of", MEAN_SENTENCE_BEFORE, ids=lambda function: function.__name__)
def test_sentences_in_code_and_pages_are_no_longer_than_they_were(paragraphs_of):
    assert mean_sentence(paragraphs_of(ROOT)) <= MEAN_SENTENCE_BEFORE[paragraphs_of]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_is_wrapped(page):
    assert too_long(page.read_text("utf-8")) == []


def test_a_sentence_is_measured_without_tables_code_and_addresses():
    page = "# Title\n\nOne two\nthree. Four `a b c` [six](far/away.md)!\n\n| a | b |\n\n```\ncode here\n```\n- Seven.\n"
    sentences = [sentence for text in paragraphs(prose_lines(page)) for sentence in sentences_of(text)]

    assert [len(words_of(sentence)) for sentence in sentences if words_of(sentence)] == [3, 3, 1]


def test_docstrings_and_comments_are_measured():
    module = '"""One two three."""\nx = 1  # four five six\n\n# Seven eight\n# nine.\n# noqa\n'

    assert [len(words_of(text)) for text in code_paragraphs(module)] == [3, 3, 3]
