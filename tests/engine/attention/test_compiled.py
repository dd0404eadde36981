"""Attention compiles for Hopper without a GPU, and codes in eight bits cost what it was tuned for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.kernels_compiled import told_by


@pytest.fixture(scope="module")
def told() -> Any:
    return told_by("tests.engine.attention.compiled")


def test_codes_in_eight_bits_become_float16_two_at_a_time_and_a_16_bit_cache_pays_nothing_for_them(told):
    plain, eight, _ = told
    assert plain["from_eight_bits"] == 0
    # 32 tokens of 128 numbers, keys and values, by 32 threads, two numbers each.
    assert eight["from_eight_bits"] == 2 * 32 * 128 // 32 // 2
    assert eight["to_bfloat16"] == 0
    assert plain["shared_bytes"] < 227_000 // 9, "nine programs run at once on a processor"
    assert eight["shared_bytes"] < 227_000 // 10, "and ten over codes"


def test_a_prefill_copies_codes_16_at_a_time_and_the_scales_of_one_position_with_each_thread(told):
    *_, prefill = told
    # Of keys and of values, with a mask and without: two tiles before a loop, and one in it.
    places = 2 * 2 * 3
    assert prefill["copies_of_4_bytes"] == places
    assert prefill["copies_of_16_bytes"] == places * 64 * 128 // 128 // 16
    assert prefill["from_eight_bits"] == 2 * 2 * 64 * 128 // 128 // 2
