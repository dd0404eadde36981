"""The benchmark of decode shapes measures what attention adds to a layer, and says which shape computes otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.engine.triton_interpreter import DEVICE, load


@pytest.fixture
def script(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    script = load("decode_shapes")
    monkeypatch.setattr(script.kernels, "DEVICE", DEVICE)
    monkeypatch.setattr(script, "LAYERS", 3)
    return script


def counting(calls: list[Callable[[], Any]]) -> float:
    """A clock that says ten microseconds for each call that reaches attention, and five besides."""
    return 5.0 + sum(10.0 for call in calls if call.args[0] is not None)


@pytest.mark.parametrize("eight", [False, True])
def test_every_shape_computes_the_same_and_its_time_is_what_attention_adds(script, eight):
    shape = script.Heads(heads=2, kv_heads=1, head_dim=32, hidden=16, dtype=torch.float32)

    told = script.measure([3, 70], eight, shape, script.tunings(eight), counting)

    assert told.pop("floor_us") > 0.0
    assert told == dict.fromkeys(script.tunings(eight), 30.0)


def test_a_shape_that_computes_something_else_is_told(script, monkeypatch):
    shape = script.Heads(heads=2, kv_heads=1, head_dim=32, hidden=16, dtype=torch.float32)
    attention = script.TritonAttention

    class Skewed(attention):
        def decode(self, *given: Any) -> torch.Tensor:
            found = super().decode(*given)
            return found if self._decode_tuning is None else 2.0 * found

    monkeypatch.setattr(script, "TritonAttention", Skewed)
    tried = {"today": None, "skewed": replace(script.FEW_DECODES, tile=64)}
    told = script.measure([9], False, shape, tried, counting)
    assert told["today"] == 30.0
    assert told["skewed"].startswith("wrong by 1.0e+00")
