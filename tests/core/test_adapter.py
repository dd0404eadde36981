"""Adapters in words."""

from __future__ import annotations

from rota.core.adapter import MOST_LISTED, listed


def test_a_sentence_lists_names_but_never_thousands():
    names = [f"a{number}" for number in range(10_000)]
    assert listed([]) == "none"
    assert listed(names[:MOST_LISTED]) == ", ".join(names[:MOST_LISTED])
    assert listed(names).endswith(f"a{MOST_LISTED - 1} and 9,950 more")
