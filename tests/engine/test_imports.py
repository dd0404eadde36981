"""What a spare imports ahead: every module with kernels, and nothing that touches a GPU."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

import rota.engine
from rota.llm.config import ON_GPU
from tests.processes import run_program

PACKAGE = Path(rota.engine.__file__).parent
WITH_KERNELS = re.compile(r"^(import|from) triton\b", re.M)

IMPORT = """
import os, sys
from rota.llm.config import import_device
import_device(sys.argv[1])
import torch
assert not torch.cuda.is_initialized()
opened = [os.readlink(entry) for entry in os.scandir("/proc/self/fd") if os.path.exists(entry)]
assert not [path for path in opened if path.startswith("/dev/nvidia")], opened
print(*sorted(name for name in sys.modules if name.startswith("rota.engine.")))
"""


def imported(device: str) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    return run_program([sys.executable, "-c", IMPORT, device], env=environment).stdout.split()


def test_all_kernels_are_imported_for_a_gpu_and_the_gpu_is_not_opened():
    pytest.importorskip("triton")
    files = [path for path in PACKAGE.rglob("*.py") if WITH_KERNELS.search(path.read_text("utf-8"))]
    names = {".".join(("rota.engine", *path.relative_to(PACKAGE).with_suffix("").parts)) for path in files}
    assert {*ON_GPU} <= names

    assert names - {*imported("cuda")} == set()
