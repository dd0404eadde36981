"""The kernels become what they were written for: Hopper's instructions, and all numbers in registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from rota.runtime.lifeline import tied
from tests.engine.quantised.compiled import CASES


def test_kernels_compile_without_a_gpu_and_spill_nothing():
    # In a process of its own: here Triton may be interpreted.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engine.quantised.compiled"]
    told = subprocess.run(tied(command), capture_output=True, text=True, check=True, env=environment, timeout=120)
    for case, found in zip(CASES, json.loads(told.stdout), strict=True):
        *_, architecture = case
        assert found["spilt_bytes"] == 0, case
        assert found["conversions"] == 0, "codes are unpacked by their bits"
        assert bool(found["hopper_products"]) == (architecture == 90), case
        assert bool(found["older_products"]) == (architecture == 80), case
        assert found["shared_bytes"] < 163_000, "an Ampere has as much, and a Hopper more"
