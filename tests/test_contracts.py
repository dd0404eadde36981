"""The rooms keep to their walls, and the check that says so can fail."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.processes import Done, run_program

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "room", ["rota.sim", "rota.scheduler", "rota.runtime.loop", "rota.runtime.process", "rota.text"]
)
def test_a_room_without_tensors_loads_no_torch(room):
    program = f"import sys, {room}; sys.exit('torch' in sys.modules)"
    run_program([sys.executable, "-c", program])


def lint(folder: Path) -> Done:
    linter = Path(sys.executable).with_name("lint-imports")
    environment = {"PYTHONPATH": str(folder / "src"), "PATH": "/usr/bin:/bin"}
    return run_program([linter, "--no-cache"], check=False, cwd=folder, env=environment)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("scheduler/queue.py", "import time"),
        ("core/ids.py", "import torch"),
        ("scheduler/rows.py", "import rota.runtime.loop"),
        ("engine/step/ticket.py", "import rota.scheduler"),
        ("engine/model/spec.py", "import rota.engine.lora.bank"),
        ("engine/families/llama.py", "import rota.engine.build"),
        ("server/app.py", "import rota.commands"),
        ("runtime/loop.py", "import torch"),
        ("bench/run.py", "import rota.runtime.loop"),
        ("policy/slot_policies/wait.py", "import rota.policy.slot_policies.drain"),
        ("policy/eviction.py", "import rota.policy.prefill_delayer"),
        ("policy/drains.py", "import rota.policy.slot_policies.rotate"),
        ("cellar.py", "import math"),
    ],
)
def test_a_deliberate_violation_fails_the_contracts(copy, file, line):
    target = copy / "src/rota" / file
    target.write_text((target.read_text() if target.exists() else "") + f"\n{line}\n")

    outcome = lint(copy)
    assert outcome.returncode == 1
    assert "BROKEN" in outcome.stdout or "missing" in outcome.stdout.lower()


def test_the_untouched_copy_keeps_every_contract(copy):
    outcome = lint(copy)
    assert outcome.returncode == 0, outcome.stdout
