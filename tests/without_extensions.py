"""Hides extensions from a run of the tests, to show that the kernel needs none: `pytest -p tests.without_extensions`.

ROTA_WITHOUT names them, with commas between. A file of tests that imports one of them is about that extension and is
left out, and so is a test that names one of its routes.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Generator
from importlib.abc import MetaPathFinder
from typing import Any

import pytest

from rota.extensions import FACES

NAMES = [name for name in os.environ.get("ROTA_WITHOUT", "").split(",") if name]
HIDDEN = "is hidden from this run of the tests"
# Where an extension lies, if that is not the folder of its face.
ALONE = {"ollama", "sim", "workload"}
ROUTES = {
    "responses": ("/v1/responses",),
    "messages": ("/v1/messages",),
    "ollama": ("/api/",),
    "embeddings": ("/v1/embeddings", "/v1/score", "/v1/rerank", "/encode"),
    "native": ("/generate", "/flush_cache", "/get_model_info", "/get_server_info"),
    "dashboard": ("/dashboard",),
}


def package_of(name: str) -> str:
    return FACES[name] if name in ALONE else FACES[name].rpartition(".")[0]


PACKAGES = [package_of(name) for name in NAMES]


class Hiding(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if any(f"{name}.".startswith(f"{package}.") for package in PACKAGES):
            raise ModuleNotFoundError(f"{name} {HIDDEN}", name=name)


sys.meta_path.insert(0, Hiding())


def asks_hidden(item: pytest.Item) -> bool:
    """Whether the test itself names a route of a hidden extension."""
    text = f"{item.name} {inspect.getsource(item.function)}" if isinstance(item, pytest.Function) else ""
    return any(route in text for name in NAMES for route in ROUTES.get(name, ()))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    report = yield
    if report.failed and HIDDEN in str(report.longrepr):
        report.outcome, report.result = "skipped", []
        report.longrepr = str(collector.path), 0, "it is about an extension that is hidden"
    return report


def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    left_out = {item for item in items if asks_hidden(item)}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
