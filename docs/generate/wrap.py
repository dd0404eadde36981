"""Prose of a page is wrapped at 110 columns; tables, code, headings and HTML stay as they are."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

COLUMNS = 110

# Where the text of a list item begins, its other lines begin too.
_ITEM = re.compile(r"^(\s*(?:[-*]|\d+\.) +)")
# A link or a piece of code stays on one line.
_WHOLE = re.compile(r"`[^`]+`|!?\[[^]]*\]\([^)]*\)")
_HELD_SPACE = "\x00"


def wrap(page: str) -> str:
    """The page with every paragraph wrapped that has a line beyond the last column."""
    wrapped: list[str] = []
    paragraph: list[str] = []
    for line, is_prose in _marked(page):
        if paragraph and (not is_prose or _ITEM.match(line)):
            wrapped += _wrapped(paragraph)
            paragraph = []
        if is_prose:
            paragraph.append(line)
        else:
            wrapped.append(line)
    return "\n".join(wrapped + _wrapped(paragraph))


def too_long(page: str) -> list[str]:
    """Lines of prose beyond the last column; the addresses of links do not count, because they cannot be wrapped."""
    return [line for line, is_prose in _marked(page) if is_prose and len(_without_addresses(line)) > COLUMNS]


def _marked(page: str) -> Iterator[tuple[str, bool]]:
    """Every line, and whether it is prose."""
    is_code = False
    for line in page.split("\n"):
        is_fence = line.lstrip().startswith("```")
        is_code ^= is_fence
        yield line, bool(line) and not (is_code or is_fence or line.startswith(("|", "#", "<", "    ")))


def _wrapped(paragraph: list[str]) -> list[str]:
    if all(len(_without_addresses(line)) <= COLUMNS for line in paragraph):
        return paragraph
    first = paragraph[0]
    item = _ITEM.match(first)
    start = item[1] if item else " " * (len(first) - len(first.lstrip()))
    text = " ".join(line.strip() for line in [first[len(start) :], *paragraph[1:]])
    held = _WHOLE.sub(lambda whole: whole[0].replace(" ", _HELD_SPACE), text)
    lines = textwrap.wrap(
        held,
        COLUMNS,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_HELD_SPACE, " ") for line in lines]


def _without_addresses(line: str) -> str:
    return re.sub(r"\]\([^)]*\)", "]", line)
