"""Operations that add the adapters' part compile for Hopper without a GPU, and keep all numbers in registers."""

from __future__ import annotations

from tests.engine.kernels_compiled import told_by


def test_kernels_compile_without_a_gpu_and_spill_nothing():
    found = told_by("tests.engine.ops.compiled")
    for name, facts in found.items():
        assert facts["spilt_bytes"] == 0, name
        assert facts["wide_loads"] > 0, f"{name} reads 16 bytes at a time"
        # Eight programs of the tiled kernels fit into a processor's registers and shared memory.
        assert facts["shared_bytes"] < 227_000 // 8, name
    assert found["silu"]["products"] > 0
    assert found["rotate"]["products"] > 0
