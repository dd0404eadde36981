"""The script that measures reads of weights runs without a GPU, and every way reads all of the files."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture
def script(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import weight_reads

    return weight_reads


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_a_machine_without_a_gpu_measures_reads_into_plain_memory(script, tmp_path, capsys):
    path = tmp_path / "new" / "reads.json"
    asked = ["--shape", "tiny", "--threads", "1", "3", "--buffer-mb", "1", "--rounds", "1", "--cold", "--busy"]
    script.main([*asked, "--output", str(path)])

    found = json.loads(path.read_text())["reads"]
    assert [(one["to"], one["way"], one["threads"]) for one in found] == [
        ("host", "map", 1),
        ("host", "ring", 1),
        ("host", "ring", 3),
        ("host", "mapped", 1),
        ("host", "mapped", 3),
    ]
    assert all(one["gb_per_s"] > 0 for one in found)
    assert "| host | ring | 3 | 1.00 |" in capsys.readouterr().out


def test_a_read_from_a_map_gives_the_file_s_bytes(script, tmp_path):
    (tmp_path / "file").write_bytes(bytes(range(100)))
    target = bytearray(7)
    with (tmp_path / "file").open("rb") as file:
        assert script.read_mapped({}, file.fileno(), [memoryview(target)], 50) == 7
    assert list(target) == list(range(50, 57))
