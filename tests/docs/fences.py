"""The fenced blocks of a page in Markdown."""

from __future__ import annotations

import re


def blocks(page: str, *kinds: str) -> list[str]:
    """What stands in a page between fences of these kinds."""
    return [text for kind, text in re.findall(r"^```(\w+)\n(.*?)^```$", page, re.M | re.S) if kind in kinds]
