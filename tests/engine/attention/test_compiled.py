"""Decode attention compiles for Hopper without a GPU, and codes in eight bits cost what it was tuned for."""

from __future__ import annotations

from tests.engine.kernels_compiled import told_by


def test_codes_in_eight_bits_become_float16_two_at_a_time_and_a_16_bit_cache_pays_nothing_for_them():
    plain, eight = told_by("tests.engine.attention.compiled")
    assert plain["from_eight_bits"] == 0
    # 64 tokens of 128 numbers, keys and values, by 64 threads, two numbers each.
    assert eight["from_eight_bits"] == 2 * 64 * 128 // 64 // 2
    assert eight["to_bfloat16"] == 0
    assert eight["shared_bytes"] < 227_000 // 5, "five programs run at once on a processor"
