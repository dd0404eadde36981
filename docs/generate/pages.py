"""A page is a template of prose in which lines such as `{{ errors }}` are filled in from the code."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from docs.generate.commands import command
from docs.generate.foreign import needless_flags, refused_flags, renamed_flags
from docs.generate.routes import routes
from docs.generate.tables import errors, ignored_fields, metrics, picker_metrics
from docs.generate.wrap import wrap

DOCS = Path(__file__).parents[1]
TEMPLATES = DOCS / "templates"
PAGES = tuple(sorted(path.name for path in TEMPLATES.glob("*.md")))

FILLERS: dict[str, Callable[..., str]] = {
    "command": command,
    "errors": errors,
    "ignored_fields": ignored_fields,
    "metrics": metrics,
    "needless_flags": needless_flags,
    "picker_metrics": picker_metrics,
    "refused_flags": refused_flags,
    "renamed_flags": renamed_flags,
    "routes": routes,
}

_LINE = re.compile(r"^\{\{ (\w+)(.*) \}\}$", re.MULTILINE)


def page(name: str) -> str:
    """What docs/NAME has to be."""
    head = f"<!-- Made by `make docs` from the code and docs/templates/{name}: edit those. -->\n"
    template = (TEMPLATES / name).read_text("utf-8")
    return head + wrap(_LINE.sub(lambda line: FILLERS[line[1]](*line[2].split()), template))
