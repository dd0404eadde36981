"""The documented errors are the table in docs/serving.md; an answer with any other code is a fault of the server."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
_ROW = re.compile(r"^\| (\d{3}) \| `(\w+)` \|", re.MULTILINE)
# A path, a method or an encoding that does not exist; the page says so in a sentence.
_WITHOUT_CODE = frozenset({404, 405, 415})


@cache
def documented() -> frozenset[tuple[int, str | None]]:
    """Every pair of status and code that a client may see."""
    found = _ROW.findall(_PAGE.read_text("utf-8"))
    assert found, f"{_PAGE} has no table of errors"
    return frozenset((int(status), code) for status, code in found) | {(status, None) for status in _WITHOUT_CODE}
