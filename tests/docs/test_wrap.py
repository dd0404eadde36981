"""Prose is wrapped where a line is too long, and nothing else of a page changes."""

from __future__ import annotations

from docs.generate.wrap import COLUMNS, too_long, wrap

WORDS = "word " * 40


def test_a_long_paragraph_is_wrapped_and_keeps_its_words():
    wrapped = wrap(WORDS)

    assert wrapped.split() == WORDS.split()
    assert max(map(len, wrapped.splitlines())) <= COLUMNS


def test_the_lines_of_a_list_item_begin_where_its_text_begins():
    _, *others = wrap(f"- {WORDS}").splitlines()

    assert others
    assert all(line.startswith("  word") for line in others)


def test_tables_code_and_headings_stay_as_they_are():
    page = f"# {WORDS}\n\n| {WORDS} |\n\n```\n{WORDS}\n```\n\n    {WORDS}\n"

    assert wrap(page) == page
    assert too_long(page) == []


def test_a_paragraph_that_is_short_enough_stays_as_it_is():
    assert wrap("one\ntwo\n") == "one\ntwo\n"


def test_a_link_is_not_broken_and_its_address_does_not_count():
    link = f"[a link of words]({'x' * 200})"

    assert link in wrap(f"{WORDS}{link} {WORDS}")
    assert too_long(link) == []
    assert too_long(WORDS) == [WORDS]
