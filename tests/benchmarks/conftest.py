"""Tests import the scripts of `benchmarks/`, which are no package, by their names; a tiny model is made for a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.h200.assets import make_assets
from benchmarks.h200.shapes import SHAPES


@pytest.fixture(autouse=True, scope="package")
def _scripts_can_be_imported() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assets") / "tiny"
    make_assets(folder, SHAPES["tiny"])
    return folder
