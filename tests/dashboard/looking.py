"""How tests look at the page: they wait for its texts, and let axe look for what not everybody can read or reach."""

from __future__ import annotations

import re
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from tests.waiting import TIMEOUT_S

WAIT_MS = 1000 * TIMEOUT_S


def wait_for_text(page: Any, selector: str, pattern: str) -> None:
    expect(page.locator(selector).first).to_have_text(re.compile(pattern), timeout=WAIT_MS)


def findings(page: Any) -> list[tuple[str, list[str]]]:
    """What axe objects to: its rule, and the elements."""
    violations = Axe().run(page).response["violations"]
    return [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in violations]
