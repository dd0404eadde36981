"""The threat model names tests that are there."""

from __future__ import annotations

import re

from docs.generate.pages import DOCS

PAGE = (DOCS / "security.md").read_text("utf-8")


def test_every_test_that_the_threat_model_names_is_there():
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", PAGE))

    assert len(named) > 30
    assert sorted(name for name in named if not (DOCS.parent / name).exists()) == []


def test_every_wall_names_a_test():
    _, _, rest = PAGE.partition("## What is defended")
    rows = [line for line in rest.partition("\n## ")[0].splitlines() if line.startswith("|")][2:]

    assert len(rows) > 15
    assert [row for row in rows if "`tests/" not in row] == []
