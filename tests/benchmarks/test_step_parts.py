"""The benchmarks of a step's parts compute it in every way, compare the ways, and say which is wrong or fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.triton_interpreter import DEVICE, load

# ── shapes of decodes ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def decode_shapes(monkeypatch) -> ModuleType:
    decode_shapes = load("decode_shapes")
    monkeypatch.setattr(decode_shapes.kernels, "DEVICE", DEVICE)
    monkeypatch.setattr(decode_shapes, "LAYERS", 3)
    return decode_shapes


def counting(calls: list[Callable[[], Any]]) -> float:
    """A clock that says ten microseconds for each call that reaches attention, and five besides."""
    return 5.0 + sum(10.0 for call in calls if call.args[0] is not None)


@pytest.mark.parametrize("eight", [False, True])
def test_every_shape_computes_the_same_and_its_time_is_what_attention_adds(decode_shapes, eight):
    shape = decode_shapes.Heads(heads=2, kv_heads=1, head_dim=32, hidden=16, dtype=torch.float32)

    told = decode_shapes.measure([3, 70], eight, shape, decode_shapes.tunings(eight), counting)

    assert told.pop("floor_us") > 0.0
    assert told == dict.fromkeys(decode_shapes.tunings(eight), 30.0)


def test_a_shape_that_computes_something_else_is_told(decode_shapes, monkeypatch):
    shape = decode_shapes.Heads(heads=2, kv_heads=1, head_dim=32, hidden=16, dtype=torch.float32)
    attention = decode_shapes.TritonAttention

    class Skewed(attention):
        def decode(self, *given: Any) -> torch.Tensor:
            found = super().decode(*given)
            return found if self._decode_tuning is None else 2.0 * found

    monkeypatch.setattr(decode_shapes, "TritonAttention", Skewed)
    tried = {"today": None, "skewed": replace(decode_shapes.FEW_DECODES, tile=64)}
    told = decode_shapes.measure([9], False, shape, tried, counting)
    assert told["today"] == 30.0
    assert told["skewed"].startswith("wrong by 1.0e+00")


# ── open sites ────────────────────────────────────────────────────────────────────────────────────────────────────────

TINY = {
    "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 32, "max_position_embeddings": 64,
    "torch_dtype": "float32",
}  # fmt: skip


@pytest.fixture
def open_sites() -> ModuleType:
    return load("open_sites")


def less_for_each(calls: Mapping[str, Callable[[], Tensor]]) -> dict[str, float]:
    """A clock that says a millisecond for today's way, and less for each way that follows."""
    return {name: 1.0 / (1 + nth) for nth, name in enumerate(calls)}


def test_every_way_is_compared_with_today_s(open_sites, monkeypatch, capsys):
    batches = {
        "base": open_sites.Batch(slots=3, adapters=0),
        "2 and base": open_sites.Batch(slots=3, adapters=2, with_base=True),
        "base, fp8": open_sites.Batch(slots=3, adapters=0, in_eight_bits=True),
    }
    ways = {name: open_sites.WAYS[name] for name in (open_sites.TODAY, "all")}
    monkeypatch.setattr(
        open_sites, "WAYS", ways | {"broken": open_sites.Way(("gate_up",), open_sites.Shapes(silu_columns=0))}
    )
    monkeypatch.setattr(open_sites, "CONTEXT", 16)
    kept: list[int] = []
    with torch.inference_mode():
        figures = open_sites.run(
            open_sites.LLAMA_8B | TINY,
            [3],
            batches,
            less_for_each,
            DEVICE,
            torch.float32,
            lambda some: kept.append(len(some)),
        )
    assert kept == [1, 4, 6]
    today = open_sites.TODAY
    assert [figure["way"] for figure in figures] == [today, today, "all", "broken", today, "rounded"]
    assert all(figure["is_right"] for figure in figures if figure["way"] != "broken")
    assert 0.0 < figures[2]["error"] < 1e-5
    assert figures[2]["saved_us_in_32_layers"] == 16_000.0
    assert "failed" in figures[3]
    assert "broken" in capsys.readouterr().out


def test_rows_that_no_graph_of_decodes_has_are_refused(open_sites, capsys):
    with pytest.raises(SystemExit):
        open_sites.parsed(["--rows", "600"])
    assert "--rows: from 1 to 512" in capsys.readouterr().err


# ── products in few bits ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def products(monkeypatch) -> ModuleType:
    module = load("quantised_products")
    monkeypatch.setitem(module.SITES, "tiny", module.Site(64, 128))
    monkeypatch.setattr(module, "TOUCHED", 20_000)
    return module


def one_by_one(calls: Sequence[Callable[[], object]]) -> float:
    """A clock that says a microsecond for each call, without calling."""
    return len(calls) / 1e3


def test_every_way_is_timed_and_right(products):
    torch.manual_seed(0)
    figures = products.measure("tiny", [1, 257], 64, 1e9, one_by_one, DEVICE)
    ran = {(one["rows"], one["way"]): one for one in figures if "us" in one}
    assert all(one["is_right"] and one["us"] == 1.0 for one in ran.values())
    always = {"bf16", "fp8 scaled", "fp8 scaled alone", "int4 written out"}
    few_rows = always | {"fp8 kernel", "int4 kernel"}
    assert set(ran) == {(1, way) for way in few_rows} | {(257, way) for way in always}
    assert ran[1, "int4 kernel"]["shape"] in ran[1, "int4 kernel"]["shapes_us"]


def test_a_way_that_does_not_run_says_why(products, capsys):
    def fails() -> torch.Tensor:
        raise RuntimeError("no such product\nand more")

    figure = products.fastest("bf16", {"": [fails]}, lambda: torch.ones(1), one_by_one)
    assert figure == {"failed": "RuntimeError: no such product"}
    products.told({"site": "o", "rows": 1, "way": "bf16", "floor_us": 1.0, **figure})
    assert "does not run: RuntimeError: no such product" in capsys.readouterr().out


def test_a_product_that_is_wrong_is_noticed(products):
    figure = products.fastest("bf16", {"": [lambda: torch.full((4,), 1.1)]}, lambda: torch.ones(4), one_by_one)
    assert not figure["is_right"]


def test_floors_are_the_bytes_that_must_move(products):
    site = products.Site(4096, 14336)
    beside = 2 * 16 * (4096 + 14336)
    assert site.moved("bf16", 16, 128) == 2 * 4096 * 14336 + beside
    assert site.moved("fp8 scaled alone", 16, 128) == 4096 * 14336 + 4 * 4096 + beside
    assert site.moved("int4 kernel", 16, 128) == 4096 * 14336 * (0.5 + 4 / 128) + beside
    assert products.copies_for(10**9) == 2
    assert products.copies_for(1000) == 20


def test_only_ways_that_ran_everywhere_are_summed(products):
    figures = [
        {"site": site, "rows": 4, "way": way, "us": 2.0, "floor_us": 1.0}
        for site in ("qkv", "o")
        for way in ("bf16", "fp8 kernel")
    ]
    figures[-1] = {"site": "o", "rows": 4, "way": "fp8 kernel", "failed": "no", "floor_us": 1.0}
    assert products.layer_sums(figures) == [{"rows": 4, "way": "bf16", "us": 4.0, "floor_us": 2.0}]


@pytest.mark.parametrize("wrong", [["--sites", "head"], ["--rows", "0"], ["--group", "48"], ["--row", "x"]])
def test_flags_are_checked(products, wrong):
    with pytest.raises(SystemExit):
        products.parsed(wrong)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_without_a_gpu_there_is_nothing_to_measure(products, capsys):
    assert products.main(["--sites", "o"]) == 2
    assert "needs a CUDA machine" in capsys.readouterr().out


def test_what_was_measured_is_kept(products, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "paper")
    monkeypatch.setattr(products, "bandwidth", lambda: 4e12)
    figure = {"site": "o", "rows": 1, "way": "bf16", "us": 2.0, "floor_us": 1.0, "error": 0.0, "is_right": True}
    monkeypatch.setattr(products, "measure", lambda *_: [figure])
    path = tmp_path / "new" / "products.json"
    assert products.main(["--sites", "o", "--rows", "1", "--output", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["figures"] == [figure]
    assert found["layer"] == [{"rows": 1, "way": "bf16", "us": 2.0, "floor_us": 1.0}]
    assert found["command"].startswith("python benchmarks/quantised_products.py --sites o --rows 1")
