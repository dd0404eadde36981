from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks.h200.assets import make_adapter, make_model
from benchmarks.h200.shapes import SHAPES
from rota.engine.families.table import read_spec
from rota.engine.lora.bank import Bank
from rota.engine.lora.files.checkpoint import read_checkpoint


@pytest.fixture
def script(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import adapter_copy

    return adapter_copy


def test_what_is_measured_is_an_adapter_that_arrives_in_every_slot(script, tmp_path):
    model = make_model(tmp_path / "model", SHAPES["tiny"].config)
    make_adapter(tmp_path / "adapter", model, 4)
    spec = read_spec(model)
    bank = Bank(spec, script.SLOTS, 8, spec.dtype, torch.device("cpu"))
    script.measure(bank, read_checkpoint(tmp_path / "adapter", spec, spec.dtype, 8), 4, repeats=1)

    for layer in range(spec.layers):
        factors = bank.factors(layer, "down")
        assert factors.ranks.tolist() == [4] * script.SLOTS
        assert bool((factors.a[:, :4] != 0).any(dim=(1, 2)).all())
        assert not bool((factors.a[:, 4:] != 0).any())


def test_a_rate_is_that_of_the_median(script):
    assert script.told([0.002, 0.004, 0.1], 84_000_000) == {"median_ms": 4.0, "max_ms": 100.0, "gb_per_s": 21.0}


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_the_script_measures_a_tiny_bank_on_a_cpu_and_leaves_the_device_out(script, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(script, "ROUND", 4)
    monkeypatch.setattr(script, "ROUNDS", 1)
    path = tmp_path / "new" / "copy.json"
    script.main(["--shape", "tiny", "--ranks", "16", "4", "--repeats", "2", "--decodes", "2", "--output", str(path)])

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


def test_steps_beside_copies_can_be_left_out(script, capsys):
    script.main(["--shape", "tiny", "--ranks", "4", "--repeats", "1", "--decodes", "0", "--stage", "off"])
    assert "steps alone" not in capsys.readouterr().out


def test_copies_into_pages_are_measured_too(script, tmp_path):
    path = tmp_path / "copy.json"
    options = ["--ranks", "4", "16", "--repeats", "3", "--decodes", "0", "--stage", "off", "--pages"]
    script.main(["--shape", "tiny", *options, "--output", str(path)])
    found = json.loads(path.read_text())
    assert found["pages"] is True
    assert [one["rank"] for one in found["adapters"]] == [4, 16]
