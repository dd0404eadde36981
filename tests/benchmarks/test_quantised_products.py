"""The benchmark of products in few bits checks what it times, and knows the bytes of each form."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.engine.triton_interpreter import DEVICE, load


@pytest.fixture
def script(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    module = load("quantised_products")
    monkeypatch.setitem(module.SITES, "tiny", module.Site(64, 128))
    monkeypatch.setattr(module, "TOUCHED", 20_000)
    return module


def one_by_one(calls: Sequence[Callable[[], object]]) -> float:
    """A clock that says a microsecond for each call, without calling."""
    return len(calls) / 1e3


def test_every_way_is_timed_and_right(script):
    torch.manual_seed(0)
    figures = script.measure("tiny", [1, 257], 64, 1e9, one_by_one, DEVICE)
    ran = {(one["rows"], one["way"]): one for one in figures if "us" in one}
    assert all(one["is_right"] and one["us"] == 1.0 for one in ran.values())
    always = {"bf16", "fp8 scaled", "fp8 scaled alone", "int4 written out"}
    few_rows = always | {"fp8 kernel", "int4 kernel"}
    assert set(ran) == {(1, way) for way in few_rows} | {(257, way) for way in always}
    assert ran[1, "int4 kernel"]["shape"] in ran[1, "int4 kernel"]["shapes_us"]


def test_a_way_that_does_not_run_says_why(script, capsys):
    def fails() -> torch.Tensor:
        raise RuntimeError("no such product\nand more")

    figure = script.fastest("bf16", {"": [fails]}, lambda: torch.ones(1), one_by_one)
    assert figure == {"failed": "RuntimeError: no such product"}
    script.told({"site": "o", "rows": 1, "way": "bf16", "floor_us": 1.0, **figure})
    assert "does not run: RuntimeError: no such product" in capsys.readouterr().out


def test_a_product_that_is_wrong_is_noticed(script):
    figure = script.fastest("bf16", {"": [lambda: torch.full((4,), 1.1)]}, lambda: torch.ones(4), one_by_one)
    assert not figure["is_right"]


def test_floors_are_the_bytes_that_must_move(script):
    site = script.Site(4096, 14336)
    beside = 2 * 16 * (4096 + 14336)
    assert site.moved("bf16", 16, 128) == 2 * 4096 * 14336 + beside
    assert site.moved("fp8 scaled alone", 16, 128) == 4096 * 14336 + 4 * 4096 + beside
    assert site.moved("int4 kernel", 16, 128) == 4096 * 14336 * (0.5 + 4 / 128) + beside
    assert script.copies_for(10**9) == 2
    assert script.copies_for(1000) == 20


def test_only_ways_that_ran_everywhere_are_summed(script):
    figures = [
        {"site": site, "rows": 4, "way": way, "us": 2.0, "floor_us": 1.0}
        for site in ("qkv", "o")
        for way in ("bf16", "fp8 kernel")
    ]
    figures[-1] = {"site": "o", "rows": 4, "way": "fp8 kernel", "failed": "no", "floor_us": 1.0}
    assert script.layer_sums(figures) == [{"rows": 4, "way": "bf16", "us": 4.0, "floor_us": 2.0}]


@pytest.mark.parametrize("wrong", [["--sites", "head"], ["--rows", "0"], ["--group", "48"], ["--row", "x"]])
def test_flags_are_checked(script, wrong):
    with pytest.raises(SystemExit):
        script.parsed(wrong)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_without_a_gpu_there_is_nothing_to_measure(script, capsys):
    assert script.main(["--sites", "o"]) == 2
    assert "needs a CUDA machine" in capsys.readouterr().out


def test_what_was_measured_is_kept(script, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "paper")
    monkeypatch.setattr(script, "bandwidth", lambda: 4e12)
    figure = {"site": "o", "rows": 1, "way": "bf16", "us": 2.0, "floor_us": 1.0, "error": 0.0, "is_right": True}
    monkeypatch.setattr(script, "measure", lambda *_: [figure])
    path = tmp_path / "new" / "products.json"
    assert script.main(["--sites", "o", "--rows", "1", "--output", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["figures"] == [figure]
    assert found["layer"] == [{"rows": 1, "way": "bf16", "us": 2.0, "floor_us": 1.0}]
    assert found["command"].startswith("python benchmarks/quantised_products.py --sites o --rows 1")
