"""Kernels compiled for a GPU that need not be here, and what became of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rota.runtime.lifeline import tied
from tests.processes import run_program

HOPPER = 90


def compile_kernel(
    kernel: Any,
    types: Mapping[str, str],
    constants: dict[str, Any],
    anywhere: Collection[str] = (),
    architecture: int = HOPPER,
    **options: int | None,
) -> Any:
    """A number without a type is an int32. 16 divides pointers and strides, but for pointers to anywhere."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    even = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if name not in anywhere and (signature[name].startswith("*") or name.endswith("stride"))
    }
    source = ASTSource(kernel, signature, constants, even)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def resources(kernel: Any) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.run(tied([tool, "-res-usage", file.name]), capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout)
    assert found is not None
    return {"registers": int(found[1]), "spilt_bytes": int(found[2]), "shared_bytes": kernel.metadata.shared}


def told_by(module: str) -> Any:
    """What a module prints as JSON, in a process of its own: here Triton may be interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", module]
    return json.loads(run_program(command, env=environment).stdout)
