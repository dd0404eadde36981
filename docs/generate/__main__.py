"""Writes every generated page: `python -m docs.generate`."""

from __future__ import annotations

from docs.generate.pages import DOCS, PAGES, page

for name in PAGES:
    (DOCS / name).write_text(page(name), "utf-8")
    print(f"docs/{name}")
