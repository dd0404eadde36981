"""A kernel in a chain touches nothing of others before it has waited, and lets the next one come after that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rota.engine import programmatic_launch
from tests.engine.kernels_compiled import told_by


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    found: dict[str, Any] = told_by("tests.engine.programmatic_launch_compiled")
    return found


def test_only_weights_are_read_before_the_wait_and_nothing_is_written(told):
    assert {name: facts["stores_before"] for name, facts in told["chained"].items()} == dict.fromkeys(
        told["chained"], 0
    )
    assert told["chained"]["norm"]["loads_before"] > 0, "its weights"
    assert told["chained"]["silu"]["loads_before"] == 0
    assert told["chained"]["product"]["loads_before"] == 0
    assert told["chained"]["product"]["prefetches_before"] > 0, "the matrix is brought near"


def test_each_waits_once_and_then_lets_the_next_come(told):
    assert {(facts["waits"], facts["signals"]) for facts in told["chained"].values()} == {(1, 1)}
    assert {(facts["waits"], facts["signals"]) for facts in told["alone"].values()} == {(0, 0)}


def test_every_kernel_that_is_launched_early_waits():
    folder = Path(programmatic_launch.__file__).parent
    texts = {
        path.name: path.read_text("utf-8") for path in folder.rglob("*.py") if path.name != "programmatic_launch.py"
    }
    able = {
        name: text.count("PROGRAMMATIC: tl.constexpr")
        for name, text in texts.items()
        if "PROGRAMMATIC: tl.constexpr" in text
    }
    assert sum(able.values()) >= 11
    assert able == {name: texts[name].count("follow(PROGRAMMATIC)") for name in able}


def test_a_cpu_has_no_early_launch(monkeypatch):
    assert programmatic_launch.programmatic(torch.zeros(1)) == {"PROGRAMMATIC": False}
    monkeypatch.setattr(programmatic_launch, "_is_able", lambda _: True)
    assert not programmatic_launch.is_programmatic(torch.device("cpu"))
    assert programmatic_launch.is_programmatic(torch.device("cuda", 0))
