"""Operations that add the adapters' part compile for Hopper without a GPU, and keep all numbers in registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from rota.runtime.lifeline import tied


def test_kernels_compile_without_a_gpu_and_spill_nothing():
    # In a process of its own: here Triton may be interpreted.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engine.ops.compiled"]
    told = subprocess.run(tied(command), capture_output=True, text=True, check=True, env=environment, timeout=120)
    found = json.loads(told.stdout)
    for name, facts in found.items():
        assert facts["spilt_bytes"] == 0, name
        assert facts["wide_loads"] > 0, f"{name} reads 16 bytes at a time"
        # Eight programs of the tiled kernels fit into a processor's registers and shared memory.
        assert facts["shared_bytes"] < 227_000 // 8, name
    assert found["silu"]["products"] > 0
    assert found["rotate"]["products"] > 0
