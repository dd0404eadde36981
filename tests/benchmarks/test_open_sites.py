"""The benchmark of open sites computes one step in every way, compares the ways, and says which does not run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.engine.triton_interpreter import DEVICE, load

TINY = {
    "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 32, "max_position_embeddings": 64,
    "torch_dtype": "float32",
}  # fmt: skip


@pytest.fixture
def script(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return load("open_sites")


def one_by_one(calls: Mapping[str, Callable[[], Tensor]]) -> dict[str, float]:
    """A clock that says a millisecond for today's way, and less for each way that follows."""
    return {name: 1.0 / (1 + nth) for nth, name in enumerate(calls)}


def test_every_way_is_compared_with_today_s(script, monkeypatch, capsys):
    batches = {
        "base": script.Batch(slots=3, adapters=0), "2 and base": script.Batch(slots=3, adapters=2, with_base=True),
        "base, fp8": script.Batch(slots=3, adapters=0, in_eight_bits=True),
    }  # fmt: skip
    ways = {name: script.WAYS[name] for name in (script.TODAY, "all")}
    monkeypatch.setattr(script, "WAYS", ways | {"broken": script.Way(("gate_up",), script.Shapes(silu_columns=0))})
    monkeypatch.setattr(script, "CONTEXT", 16)
    kept: list[int] = []
    with torch.inference_mode():
        figures = script.run(
            script.LLAMA_8B | TINY, [3], batches, one_by_one, DEVICE, torch.float32, lambda some: kept.append(len(some))
        )
    assert kept == [1, 4, 6]
    today = script.TODAY
    assert [figure["way"] for figure in figures] == [today, today, "all", "broken", today, "rounded"]
    assert all(figure["is_right"] for figure in figures if figure["way"] != "broken")
    assert 0.0 < figures[2]["error"] < 1e-5
    assert figures[2]["saved_us_in_32_layers"] == 16_000.0
    assert "failed" in figures[3]
    assert "broken" in capsys.readouterr().out


def test_rows_that_no_graph_of_decodes_has_are_refused(script, capsys):
    with pytest.raises(SystemExit):
        script.parsed(["--rows", "600"])
    assert "--rows: from 1 to 512" in capsys.readouterr().err
