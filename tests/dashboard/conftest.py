"""A stage for each test, and a real browser for those that look at the page; without a Chromium they are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.dashboard.stage import Stage, stage

ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


# Not for the whole session: while it is open an event loop runs in this thread, and tests that run one could not.
@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: install one (Debian: apt-get install chromium) to test the dashboard")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        yield browser
        browser.close()


@pytest.fixture
def on_stage(tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    with ExitStack() as stack:
        yield lambda **given: stack.enter_context(stage(tmp_path, **given))
