"""The script that measures reads of adapters runs without a GPU, and reads both precisions in both ways."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import torch


def test_both_precisions_are_read_in_both_ways(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import adapter_reads

    threads = torch.get_num_threads()
    path = tmp_path / "new" / "reads.json"
    adapter_reads.main(["--shape", "tiny", "--threads", "1", "3", "--rounds", "2", "--output", str(path)])
    torch.set_num_threads(threads)

    found = json.loads(path.read_text())["reads"]
    assert [(one["precision"], one["way"], one["threads"]) for one in found] == list(
        product(("bfloat16", "float32"), ("packed", "put together"), (1, 3))
    )
    assert all(one["milliseconds"] > 0 for one in found)
    assert "| float32 | packed | 3 |" in capsys.readouterr().out
