"""Pieces of the Lark dialect that the grammar library reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

# It may be empty. Special tokens are not text, so they never match it.
ANY_TEXT = "TEXT: /(.|\\n)*/"


def quoted(text: str) -> str:
    """A literal text."""
    return json.dumps(text, ensure_ascii=False)


def spelled(text: str, specials: Mapping[str, int]) -> str:
    """A literal text in which the names of special tokens stand for those tokens. `specials`: ids by name."""
    if not specials:
        return quoted(text) if text else ""
    names = "|".join(re.escape(name) for name in sorted(specials, key=len, reverse=True))
    parts = re.split(f"({names})", text)
    return " ".join(f"<[{specials[part]}]>" if part in specials else quoted(part) for part in parts if part)


def marker(rule: str, text: str, specials: Mapping[str, int]) -> Iterator[str]:
    """Rules for any text up to a marker, with the marker. The first time that the marker comes, the text is over."""
    if text in specials:
        yield f"{rule}: TEXT {spelled(text, specials)}"
    else:
        yield f"{rule}[lazy]: TEXT {quoted(text)}"
