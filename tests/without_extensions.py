"""Hides extensions from a run of the tests, to show that the kernel needs none: `pytest -p tests.without_extensions`.

ROTA_WITHOUT names them, with commas between. A file of tests that imports one of them is about that extension and is
left out, and a test that names or asks one of its routes too.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Generator, Iterator
from importlib import import_module
from importlib.abc import MetaPathFinder
from typing import Any

import httpx
import pytest

from rota.extensions import FACES

NAMES = [name for name in os.environ.get("ROTA_WITHOUT", "").split(",") if name]
HIDDEN = "is hidden from this run of the tests"
# Where an extension lies, if that is not the folder of its face.
ALONE = {"sim", "workload"}


def package_of(name: str) -> str:
    return FACES[name] if name in ALONE else FACES[name].rpartition(".")[0]


PACKAGES = [package_of(name) for name in NAMES]
# They look at the routes of all dialects together.
ABOUT_ALL = (
    "test_every_route_but_the_open_ones_is_closed_also_those_that_come_later",
    "test_the_field_rota_is_described",
)
# What the paths of their routes begin with, as far as a path is fixed.
PATHS = tuple(
    {
        path.partition("{")[0]
        for name in NAMES
        for route in getattr(import_module(FACES[name]), "ROUTES", ())
        for path in (one.partition(" ")[2] for one in route.names)
    }
)
for name in [one for one in sys.modules if any(f"{one}.".startswith(f"{package}.") for package in PACKAGES)]:
    del sys.modules[name]


class Hiding(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if any(f"{name}.".startswith(f"{package}.") for package in PACKAGES):
            raise ModuleNotFoundError(f"{name} {HIDDEN}", name=name)


sys.meta_path.insert(0, Hiding())


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    report = yield
    if report.failed and HIDDEN in str(report.longrepr):
        report.outcome, report.result = "skipped", []
        report.longrepr = str(collector.path), 0, "it is about an extension that is hidden"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """A test that itself imports what is hidden is about it. If the kernel imports it, the test has failed."""
    report = yield
    if call.excinfo and call.excinfo.errisinstance(ModuleNotFoundError) and HIDDEN in str(call.excinfo.value):
        paths = [str(entry.path) for entry in call.excinfo.traceback]
        importer = [path for path in paths if path != __file__ and "importlib" not in path][-1]
        if "/tests/" in importer:
            report.outcome, report.longrepr = "skipped", (str(item.path), 0, "it imports an extension that is hidden")
    return report


def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """A test that names a hidden route may ask it in a thread, and wait in another for what will never come."""
    left_out = {item for item in items if PATHS and names_hidden(item)}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def names_hidden(item: pytest.Item) -> bool:
    source = inspect.getsource(item.function) if isinstance(item, pytest.Function) else ""
    by_client = any(f".{name}." in source for name in NAMES)  # as in client.responses.create
    return item.name in ABOUT_ALL or by_client or any(path in source or path in item.name for path in PATHS)


def skip_if_hidden(request: httpx.Request) -> None:
    if PATHS and request.url.path.startswith(PATHS):
        pytest.skip("it asks a route of an extension that is hidden")


@pytest.fixture(autouse=True, scope="session")
def asks_no_hidden_route() -> Iterator[None]:
    send, send_async = httpx.Client.send, httpx.AsyncClient.send

    def checked(client: httpx.Client, request: httpx.Request, **how: Any) -> httpx.Response:
        skip_if_hidden(request)
        return send(client, request, **how)

    async def checked_async(client: httpx.AsyncClient, request: httpx.Request, **how: Any) -> httpx.Response:
        skip_if_hidden(request)
        return await send_async(client, request, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpx.Client, "send", checked)
        patch.setattr(httpx.AsyncClient, "send", checked_async)
        yield
