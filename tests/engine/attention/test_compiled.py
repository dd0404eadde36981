"""Decode attention compiles for Hopper without a GPU, and codes in eight bits cost what it was tuned for."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from rota.runtime.lifeline import tied


def test_codes_in_eight_bits_become_float16_two_at_a_time_and_a_16_bit_cache_pays_nothing_for_them():
    # In a process of its own: here Triton may be interpreted.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engine.attention.compiled"]
    told = subprocess.run(tied(command), capture_output=True, text=True, check=True, env=environment, timeout=120)
    plain, eight = json.loads(told.stdout)
    assert plain["from_eight_bits"] == 0
    # 64 tokens of 128 numbers, keys and values, by 64 threads, two numbers each.
    assert eight["from_eight_bits"] == 2 * 64 * 128 // 64 // 2
    assert eight["to_bfloat16"] == 0
    assert eight["shared_bytes"] < 227_000 // 5, "five programs run at once on a processor"
