"""The benchmark of ranks says whether they agree, and a part that fails leaves the others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import tensor_parallel

SCORES = [-1.0, -2.0]


def run(greedy: list[list[int]], mixed: list[list[int]], scores: list[float] = SCORES) -> dict[str, Any]:
    return {
        "greedy": greedy, "mixed": mixed, "scores": scores, "has_graphs": True, "start_s": 1.0, "greedy_step_ms": 2.0
    }  # fmt: skip


def test_ranks_that_give_other_tokens_are_noticed():
    one = run([[1, 2], [3, 4]], [[1, 2, 9], [3, 4, 8]])
    other = run([[1, 2], [3, 5]], [[1, 2, 9], [3, 5, 7]], [-1.0, -2.5])
    told = tensor_parallel.agreement(one, one, other)
    differs = tensor_parallel.agreement(one, other, other)

    assert (told["ranks agree"], told["greedy as one rank"], told["scores differ by at most"]) == (False, True, 0.0)
    assert (differs["ranks agree"], differs["greedy as one rank"]) == (True, False)
    assert differs["tokens as one rank, greedy, drawn and penalised"] == "4 of 6"
    assert differs["scores differ by at most"] == 0.5


def test_a_part_that_fails_or_hangs_says_so():
    assert "No module named" in tensor_parallel.printed("benchmarks.none", [], 60.0)["failed"]
    assert "still running" in tensor_parallel.printed("http.server", ["0"], 0.1)["failed"]


@pytest.mark.long("three processes build an engine each")
def test_two_ranks_on_a_cpu_are_one_rank_s_equals(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["", "--only", "ranks", "--shape", "tiny", "--output", str(tmp_path / "told")])
    tensor_parallel.main()

    told = json.loads((tmp_path / "told").read_text())["two ranks, float32"]
    assert told["ranks agree"]
    assert told["greedy as one rank"]
    assert told["adapters matter"]
