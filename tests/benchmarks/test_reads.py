"""The scripts that measure reads and copies run without a GPU, and measure what they say."""

from __future__ import annotations

import json
from itertools import product
from types import ModuleType

import pytest
import torch

from benchmarks.h200.assets import make_adapter, make_model
from benchmarks.h200.shapes import SHAPES
from rota.engine.families.table import read_spec
from rota.engine.lora.bank import Bank
from rota.engine.lora.files.checkpoint import read_checkpoint

# ── reads of weights ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def weight_reads() -> ModuleType:
    import weight_reads

    return weight_reads


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_a_machine_without_a_gpu_measures_reads_into_plain_memory(weight_reads, tmp_path, capsys):
    path = tmp_path / "new" / "reads.json"
    asked = ["--shape", "tiny", "--threads", "1", "3", "--buffer-mb", "1", "--rounds", "1", "--cold", "--busy"]
    weight_reads.main([*asked, "--output", str(path)])

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


def test_a_read_from_a_map_gives_the_file_s_bytes(weight_reads, tmp_path):
    (tmp_path / "file").write_bytes(bytes(range(100)))
    target = bytearray(7)
    with (tmp_path / "file").open("rb") as file:
        assert weight_reads.read_mapped({}, file.fileno(), [memoryview(target)], 50) == 7
    assert list(target) == list(range(50, 57))


# ── reads of adapters ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_both_precisions_are_read_in_both_ways(tmp_path, capsys):
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


# ── copies into slots ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def adapter_copy() -> ModuleType:
    import adapter_copy

    return adapter_copy


def test_what_is_measured_is_an_adapter_that_arrives_in_every_slot(adapter_copy, tmp_path):
    model = make_model(tmp_path / "model", SHAPES["tiny"].config)
    make_adapter(tmp_path / "adapter", model, 4)
    spec = read_spec(model)
    bank = Bank(spec, adapter_copy.SLOTS, 8, spec.dtype, torch.device("cpu"))
    adapter_copy.measure(bank, read_checkpoint(tmp_path / "adapter", spec, spec.dtype, 8), 4, repeats=1)

    for layer in range(spec.layers):
        factors = bank.factors(layer, "down")
        assert factors.ranks.tolist() == [4] * adapter_copy.SLOTS
        assert bool((factors.a[:, :4] != 0).any(dim=(1, 2)).all())
        assert not bool((factors.a[:, 4:] != 0).any())


def test_a_rate_is_that_of_the_median(adapter_copy):
    assert adapter_copy.told([0.002, 0.004, 0.1], 84_000_000) == {"median_ms": 4.0, "max_ms": 100.0, "gb_per_s": 21.0}


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_the_script_measures_a_tiny_bank_on_a_cpu_and_leaves_the_device_out(
    adapter_copy, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(adapter_copy, "ROUND", 4)
    monkeypatch.setattr(adapter_copy, "ROUNDS", 1)
    path = tmp_path / "new" / "copy.json"
    adapter_copy.main(
        ["--shape", "tiny", "--ranks", "16", "4", "--repeats", "2", "--decodes", "2", "--output", str(path)]
    )

    found = json.loads(path.read_text())
    assert [(one["rank"], one["stage"]) for one in found["adapters"]] == [
        (4, "on"),
        (4, "off"),
        (16, "on"),
        (16, "off"),
    ]
    assert found["max_rank"] == 16
    small, _, large, without = found["adapters"]
    assert large["size_mb"] == pytest.approx(4 * small["size_mb"], rel=0.1)
    assert large["bank_mb"] == pytest.approx(without["bank_mb"] * 4 / 3, abs=0.01)
    for one in found["adapters"]:
        for figures in (one, one["beside"]):
            assert figures["device"] is None
            assert 0.0 < figures["wall"]["median_ms"] <= figures["wall"]["max_ms"]
            assert 0.0 < figures["queue"]["median_ms"] <= figures["wall"]["median_ms"]
        assert 0.0 < one["beside"]["step_ms"]["beside_median"] <= one["beside"]["step_ms"]["beside_max"]
    printed = capsys.readouterr().out
    assert "No GPU here: times on the device are left out" in printed
    assert "rank 16, stage off" in printed


def test_steps_beside_copies_can_be_left_out(adapter_copy, capsys):
    adapter_copy.main(["--shape", "tiny", "--ranks", "4", "--repeats", "1", "--decodes", "0", "--stage", "off"])
    assert "steps alone" not in capsys.readouterr().out


def test_copies_into_pages_are_measured_too(adapter_copy, tmp_path):
    path = tmp_path / "copy.json"
    options = ["--ranks", "4", "16", "--repeats", "3", "--decodes", "0", "--stage", "off", "--pages"]
    adapter_copy.main(["--shape", "tiny", *options, "--output", str(path)])
    found = json.loads(path.read_text())
    assert found["pages"] is True
    assert [one["rank"] for one in found["adapters"]] == [4, 16]
