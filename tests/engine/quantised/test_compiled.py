"""The kernels become what they were written for: Hopper's instructions, and all numbers in registers."""

from __future__ import annotations

from tests.engine.kernels_compiled import told_by
from tests.engine.quantised.compiled import CASES


def test_kernels_compile_without_a_gpu_and_spill_nothing():
    for case, found in zip(CASES, told_by("tests.engine.quantised.compiled"), strict=True):
        *_, architecture = case
        assert found["spilt_bytes"] == 0, case
        assert found["conversions"] == 0, "codes are unpacked by their bits"
        assert bool(found["hopper_products"]) == (architecture == 90), case
        assert bool(found["older_products"]) == (architecture == 80), case
        assert found["shared_bytes"] < 163_000, "an Ampere has as much, and a Hopper more"
