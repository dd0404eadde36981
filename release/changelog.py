"""A version's section of the changelog is what its release says of itself."""

from __future__ import annotations

import re


def section(changelog: str, version: str) -> str:
    """Raises ValueError for a version without a section, or one that has no date yet."""
    found = re.search(rf"^## \[{re.escape(version)}\] - ([^\n]*)\n(.*?)(?=^## |\Z)", changelog, re.M | re.S)
    if found is None or not re.fullmatch(r"\d{4}-\d\d-\d\d", found[1]):
        raise ValueError(f"CHANGELOG.md has no section of {version} with a date: write one, then make the release.")
    return f"# Rota {version}, {found[1]}\n\n{found[2].strip()}\n"
