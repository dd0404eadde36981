"""The kernels of adapters compile for Hopper without a GPU: pages cost a look-up, and nothing where there are none."""

from __future__ import annotations

from tests.engine.kernels_compiled import told_by


def test_factors_are_read_in_the_same_wide_loads_with_pages_and_a_bank_without_them_has_no_table():
    for plain, paged in told_by("tests.engine.lora.compiled"):
        assert plain["pointers"] == paged["pointers"] - 1
        assert plain["wide_loads"] == paged["wide_loads"] > 0
        assert plain["spilt_bytes"] == paged["spilt_bytes"] == 0
        assert paged["registers"] <= 128, "four programs of 128 threads run at once on a processor"
