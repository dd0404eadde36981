"""A stage for each test, and a real browser for those that look at the page; without a Chromium they are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.dashboard.looking import WAIT_MS
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


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens pages and, at the end, wants no error on any console and no request to another origin."""
    errors: list[str] = []
    strangers: list[str] = []
    with ExitStack() as stack:

        def open_page(url: str, **options: object) -> Any:
            page = stack.enter_context(browser.new_page(**options))
            page.set_default_timeout(WAIT_MS)
            origin = "/".join(url.split("/")[:3])
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on("console", lambda said: errors.extend([said.text] if said.type in ("error", "warning") else []))
            page.on("request", lambda asked: strangers.extend([] if asked.url.startswith(origin) else [asked.url]))
            page.goto(url)
            return page

        yield open_page
    assert errors == []
    assert strangers == []
