from __future__ import annotations

import json

import pytest

from benchmarks.h200.assets import make_model
from benchmarks.h200.floors import Load, floor_bytes, layer_numbers
from benchmarks.h200.kinds import KINDS
from benchmarks.h200.shapes import LLAMA_8B
from benchmarks.h200.trace import MARK, profile, read_kernels
from rota.engine.families.table import read_spec

REPLAY = ["nvjet_tst_64x8", "shrink_kernel", "argmax_reduce", "Memcpy DtoH"]


def trace(steps: int, idle_us: float) -> dict:
    """Steps of four kernels of 10 µs, the second beside the first; launched together, as a graph's are."""
    events = []
    for step in range(steps):
        events.append({"ph": "X", "name": MARK, "cat": "user_annotation", "ts": step * 100.0, "dur": 20.0})
        # Where the device did it: a step later, while the host goes on.
        events.append({"ph": "X", "name": MARK, "cat": "gpu_user_annotation", "ts": step * 100.0 + 50, "dur": 30.0})
        launch = {"ph": "X", "name": "cudaGraphLaunch", "cat": "cuda_runtime", "ts": step * 100.0 + 5, "dur": 5.0}
        events.append({**launch, "args": {"correlation": step}})
        begin = 1000.0 + step * (30.0 + idle_us)
        for name, offset in zip(REPLAY, (0.0, 0.0, 10.0, 20.0), strict=True):
            kernel = {"ph": "X", "name": name, "cat": "kernel", "ts": begin + offset, "dur": 10.0}
            events.append({**kernel, "args": {"correlation": step}})
    stray = {"ph": "X", "name": "an adapter's copy", "cat": "gpu_memcpy", "ts": 1001.0, "dur": 500.0}
    return {"traceEvents": [*events, {**stray, "args": {"correlation": 99}}, {"ph": "M", "name": "process_name"}]}


def test_a_trace_is_whole_steps_with_what_was_busy_and_what_was_not():
    found = profile(read_kernels(trace(steps=6, idle_us=3.0)))

    assert found.steps == 4
    assert found.step_us == pytest.approx(33.0)
    assert found.busy_us == pytest.approx(30.0), "kernels side by side count once"
    assert found.between_us == pytest.approx(3.0)
    assert found.kernels == 4.0
    assert found.families == {
        family: pytest.approx((10.0, 1.0)) for family in ("gemm", "lora shrink", "sampling", "copies and small")
    }


def test_steps_of_which_the_trace_lost_kernels_do_not_count():
    torn = trace(steps=9, idle_us=3.0)
    torn["traceEvents"] = [
        event
        for event in torn["traceEvents"]
        if event.get("cat") != "kernel" or event["args"]["correlation"] not in (3, 6) or "Memcpy" in event["name"]
    ]

    assert profile(read_kernels(torn)).steps == 3, "1, 4 and 7: each is whole, and so is the next"
    assert profile(read_kernels(torn)).busy_us == pytest.approx(30.0)
    assert profile(read_kernels(torn)).families["gemm"] == pytest.approx((10.0, 1.0))


def test_what_no_step_launched_is_left_out():
    assert "an adapter's copy" not in {kernel.name for kernel in read_kernels(trace(steps=4, idle_us=0.0))}


def test_eight_bits_halve_the_floor_of_matrices_and_of_kv_and_no_other(tmp_path):
    spec = read_spec(make_model(tmp_path / "model", LLAMA_8B))
    load = Load(tokens=1, sampled=0, context_tokens=10**6, adapters=1, rank=8)
    usual, fewer = (floor_bytes(spec, load, KINDS[kind]) for kind in ("bf16", "fp8+kv"))
    assert fewer["attention"] == pytest.approx(usual["attention"] / 2, rel=1e-3)
    matrices = layer_numbers(spec) * spec.layers
    assert usual["gemm"] - fewer["gemm"] == pytest.approx(matrices, rel=0.05)
    assert all(fewer[family] == usual[family] for family in usual.keys() - {"attention", "gemm"})


@pytest.mark.parametrize(
    ("flags", "adapters"), [(["--batches", "3", "--adapters", "3"], {0, 3}), (["--prefill"], {0, 1, 6})]
)
def test_the_script_profiles_a_tiny_model_on_a_cpu(tmp_path, flags, adapters):
    from profile_step import main

    main(["--shape", "tiny", "--steps", "4", "--out", str(tmp_path), *flags])

    (found,) = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    for case in found["cases"]:
        assert case["step_us"] > 0.0
        assert case["floor_us"] > 0.0
        assert case["trace"]["families"]["gemm"][1] >= 1.0
    assert {case["adapters"] for case in found["cases"]} == adapters
