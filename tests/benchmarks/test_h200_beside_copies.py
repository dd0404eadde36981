"""The benchmark of steps beside copies: every way copies the same bytes, and what a copy delays is told."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.engine.triton_interpreter import DEVICE, load

KEPT = Path(__file__).parents[2] / "benchmarks" / "results" / "h200" / "2026-11-17-beside-copies.json"
SIZE, COUNT = 3 * 10_240, 10


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("benchmarks.h200.beside_copies")


@pytest.fixture
def adapter(script):
    adapter = script.AdapterBytes(torch.device(DEVICE), SIZE, COUNT)
    adapter.source.random_()
    adapter.target.zero_()
    return adapter


def at(address: int, memory: torch.Tensor, size: int) -> list[int]:
    start = address - memory.data_ptr()
    return memory[start : start + size].tolist()


def test_one_copy_and_a_kernel_bring_every_byte(adapter):
    # More than a block for a program, and a last block that is not full.
    for copy in (adapter.one, lambda: adapter.by_kernel(1), lambda: adapter.by_kernel(4)):
        adapter.target.zero_()
        copy()
        assert adapter.target[:SIZE].tolist() == adapter.source.tolist()
        assert not adapter.target[SIZE:].any()


def test_single_copies_bring_the_stretches_that_a_call_of_the_driver_has(script, adapter):
    adapter.singles()
    assert [size for _, size in adapter.targets] == [size for _, size in adapter.sources] == [adapter.stretch] * COUNT
    for (to, size), (out_of, _) in zip(adapter.targets, adapter.sources, strict=True):
        assert at(to, adapter.target, size) == at(out_of, adapter.source, size)
    assert adapter.targets[1][0] - adapter.targets[0][0] == adapter.stretch + script.GAP


def test_pieces_are_all_stretches_once(script, adapter, monkeypatch):
    asked = []
    monkeypatch.setattr(script.copies, "copy_stretches", lambda to, out_of: asked.append((to, out_of)))
    adapter.pieces(4, waits=False)
    assert [len(to) for to, _ in asked] == [3, 3, 3, 1]
    assert [one for to, _ in asked for one in to.tolist()] == adapter.targets.tolist()
    assert [one for _, out_of in asked for one in out_of.tolist()] == adapter.sources.tolist()


def test_the_driver_is_given_the_flags_of_a_way_and_none_afterwards(script, adapter, monkeypatch):
    flags = []

    def call(*arguments: object) -> int:
        attributes = ctypes.cast(arguments[4], ctypes.POINTER(usual)).contents
        flags.append((attributes.source_order, attributes.flags))
        return 0

    batched_copy = script.copies
    usual = batched_copy._Attributes
    monkeypatch.setattr(batched_copy, "_driver_call", lambda: call)
    monkeypatch.setattr("torch.cuda.current_stream", lambda: SimpleNamespace(cuda_stream=0))
    ways = script.ways_of(adapter)
    ways["batch"]()
    ways["batch overlap"]()
    batched_copy.copy_stretches(adapter.targets, adapter.sources)
    assert flags == [(batched_copy.IN_STREAM_ORDER, given) for given in (0, script.OVERLAP, 0)]
    assert batched_copy._Attributes is usual


def test_a_step_that_a_copy_delays_is_told_and_one_outlier_is_not(script):
    def worst(step_ms: list[float]) -> float:
        return script.told(step_ms, [1.0], [], [])["worst of 12 over median"]

    even = [4.0] * 219
    assert worst(even) == 1.0
    assert worst([9.0, *even[1:]]) == 1.0
    assert worst([5.0 if number % 12 == 7 else 4.0 for number in range(219)]) == 1.25


def test_what_is_told_has_no_copies_where_there_were_none(script):
    step_ms = [float(number) for number in range(1, 101)]
    told = script.told(step_ms, [4.0, 7.123], [], [])
    assert told | {"worst of 12 over median": 0} == {
        "median": 50.5, "p95": 96.0, "max": 100.0, "worst of 12 over median": 0, "host max gap": 7.12,
        "copy ms": None, "submit ms": None,
    }  # fmt: skip
    told = script.told(step_ms, [4.0], [1.0, 9.0, 2.0], [0.5])
    assert (told["copy ms"], told["submit ms"]) == (2.0, 0.5)


def test_the_kept_result_has_every_kind_of_inputs_in_every_way(script, adapter):
    kept = json.loads(KEPT.read_text())
    assert list(kept) == [f"{way} / {name}" for way in script.INPUTS for name in script.ways_of(adapter)]
    one = script.told([4.0] * 219, [4.0], [1.0], [1.0])
    assert all(list(found) == list(one) for found in kept.values())
    worst = {name: found["worst of 12 over median"] for name, found in kept.items()}
    assert max(figure for name, figure in worst.items() if "sm" not in name) == 1.01
    assert max(worst.values()) == 1.063


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_without_a_gpu_the_script_says_so(script, tmp_path, capsys):
    with pytest.raises(SystemExit):
        script.main(["--out", str(tmp_path / "found.json")])
    assert "this needs a GPU" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
