"""The kernels of adapters compile for Hopper without a GPU: pages cost a look-up, and nothing where there are none."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from rota.runtime.lifeline import tied


def test_factors_are_read_in_the_same_wide_loads_with_pages_and_a_bank_without_them_has_no_table():
    # In a process of its own: here Triton may be interpreted.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engine.lora.compiled"]
    told = subprocess.run(tied(command), capture_output=True, text=True, check=True, env=environment, timeout=120)
    for plain, paged in json.loads(told.stdout):
        assert plain["pointers"] == paged["pointers"] - 1
        assert plain["wide_loads"] == paged["wide_loads"] > 0
        assert plain["spilt_bytes"] == paged["spilt_bytes"] == 0
        assert paged["registers"] <= 128, "four programs of 128 threads run at once on a processor"
