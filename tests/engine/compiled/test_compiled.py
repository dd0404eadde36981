"""Kernels compile without a GPU, and become what they were tuned for. One process compiles all of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.compiled.quantised import CASES
from tests.engine.kernels_compiled import told_by


@pytest.fixture(scope="module")
def told() -> Any:
    return told_by("tests.engine.compiled")


def test_codes_in_eight_bits_become_float16_two_at_a_time_and_a_16_bit_cache_pays_nothing_for_them(told):
    plain, eight, _ = told["attention"]
    assert plain["from_eight_bits"] == 0
    # 32 tokens of 128 numbers, keys and values, by 32 threads, two numbers each.
    assert eight["from_eight_bits"] == 2 * 32 * 128 // 32 // 2
    assert eight["to_bfloat16"] == 0
    assert plain["shared_bytes"] < 227_000 // 9, "nine programs run at once on a processor"
    assert eight["shared_bytes"] < 227_000 // 10, "and ten over codes"


def test_a_prefill_copies_codes_16_at_a_time_and_the_scales_of_one_position_with_each_thread(told):
    *_, prefill = told["attention"]
    # Of keys and of values, with a mask and without: two tiles before a loop, and one in it.
    places = 2 * 2 * 3
    assert prefill["copies_of_4_bytes"] == places
    assert prefill["copies_of_16_bytes"] == places * 64 * 128 // 128 // 16
    assert prefill["from_eight_bits"] == 2 * 2 * 64 * 128 // 128 // 2


def test_factors_are_read_in_the_same_wide_loads_with_pages_and_a_bank_without_them_has_no_table(told):
    for plain, paged in told["lora"]["without pages and with them"]:
        assert plain["pointers"] == paged["pointers"] - 1
        assert plain["wide_loads"] == paged["wide_loads"] > 0
        assert plain["spilt_bytes"] == paged["spilt_bytes"] == 0
        assert paged["registers"] <= 128, "four programs of 128 threads run at once on a processor"


def test_kernels_with_trims_have_one_more_pointer(told):
    for plain, with_gain_bias in told["lora"]["without trims and with them"]:
        assert with_gain_bias["pointers"] == plain["pointers"] + 1
        assert with_gain_bias["spilt_bytes"] == 0
        assert with_gain_bias["registers"] <= 128, "four programs of 128 threads run at once on a processor"


def test_two_programs_of_own_heads_share_a_processor(told):
    found = told["lora"]["own head"]
    assert found["spilt_bytes"] == 0
    assert found["registers"] <= 128, "four programs of 128 threads run at once on a processor"
    assert found["shared_bytes"] <= 100_000, "two programs share a processor's memory"


def test_operations_that_add_the_adapters_part_keep_all_numbers_in_registers(told):
    found = told["ops"]
    for name, facts in found.items():
        assert facts["spilt_bytes"] == 0, name
        assert facts["wide_loads"] > 0, f"{name} reads 16 bytes at a time"
        # Eight programs of the tiled kernels fit into a processor's registers and shared memory.
        assert facts["shared_bytes"] < 227_000 // 8, name
    assert found["silu"]["products"] > 0
    assert found["rotate"]["products"] > 0


def test_products_with_packed_matrices_are_each_architecture_s_own_and_spill_nothing(told):
    for case, found in zip(CASES, told["quantised"], strict=True):
        *_, architecture = case
        assert found["spilt_bytes"] == 0, case
        assert found["conversions"] == 0, "codes are unpacked by their bits"
        assert bool(found["hopper_products"]) == (architecture == 90), case
        assert bool(found["older_products"]) == (architecture == 80), case
        assert found["shared_bytes"] < 163_000, "an Ampere has as much, and a Hopper more"
