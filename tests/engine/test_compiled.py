"""Kernels compile without a GPU, and become what they were tuned for. One process compiles all of them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rota.engine import programmatic_launch
from tests.processes import run_program

pytestmark = pytest.mark.long("every kernel is compiled for a GPU; what kernels compute is tested by the interpreter")


@pytest.fixture(scope="module")
def told() -> Any:
    """What the program says, in a process of its own: here Triton may be interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return json.loads(run_program([sys.executable, "-m", "tests.engine.compiled"], env=environment).stdout)


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
    for found in told["quantised"]:
        architecture = found["architecture"]
        assert found["spilt_bytes"] == 0, found
        assert found["conversions"] == 0, "codes are unpacked by their bits"
        assert bool(found["hopper_products"]) == (architecture == 90), found
        assert bool(found["older_products"]) == (architecture == 80), found
        assert found["shared_bytes"] < 163_000, "an Ampere has as much, and a Hopper more"


# A kernel in a chain touches nothing of others before it has waited, and lets the next one come after that.


def test_only_weights_are_read_before_the_wait_and_nothing_is_written(told):
    chained = told["launches"]["chained"]
    assert {name: facts["stores_before"] for name, facts in chained.items()} == dict.fromkeys(chained, 0)
    assert chained["norm"]["loads_before"] > 0, "its weights"
    assert chained["silu"]["loads_before"] == 0
    assert chained["product"]["loads_before"] == 0
    assert chained["product"]["prefetches_before"] > 0, "the matrix is brought near"


def test_each_waits_once_and_then_lets_the_next_come(told):
    chained, alone = (told["launches"][how] for how in ("chained", "alone"))
    assert {(facts["waits"], facts["signals"]) for facts in chained.values()} == {(1, 1)}
    assert {(facts["waits"], facts["signals"]) for facts in alone.values()} == {(0, 0)}


def test_every_kernel_that_is_launched_early_waits():
    folder = Path(programmatic_launch.__file__).parent
    texts = {
        path.name: path.read_text("utf-8") for path in folder.rglob("*.py") if path.name != "programmatic_launch.py"
    }
    able = {
        name: text.count("PROGRAMMATIC: tl.constexpr")
        for name, text in texts.items()
        if "PROGRAMMATIC: tl.constexpr" in text
    }
    assert sum(able.values()) >= 11
    assert able == {name: texts[name].count("follow(PROGRAMMATIC)") for name in able}


def test_a_cpu_has_no_early_launch(monkeypatch):
    assert programmatic_launch.programmatic(torch.zeros(1)) == {"PROGRAMMATIC": False}
    monkeypatch.setattr(programmatic_launch, "_is_able", lambda _: True)
    assert not programmatic_launch.is_programmatic(torch.device("cpu"))
    assert programmatic_launch.is_programmatic(torch.device("cuda", 0))
