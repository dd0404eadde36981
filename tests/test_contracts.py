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


def violate(folder: Path, module: str, imported: str) -> None:
    target = folder / f"src/{module.replace('.', '/')}.py"
    target.write_text((target.read_text() if target.exists() else "") + f"\nimport {imported}\n")


def test_deliberate_violations_are_named_each_with_its_import(copy):
    imports = {
        "rota.scheduler.queues": "time",
        "rota.core.ids": "torch",
        "rota.scheduler.rows": "rota.runtime.loop",
        "rota.engine.step.ticket": "rota.scheduler",
        "rota.server.app": "rota.commands",
        "rota.runtime.loop": "torch",
        "rota.bench.run": "rota.runtime.loop",
        "rota.policy.slot_policies.wait": "rota.policy.slot_policies.drain",
        "rota.policy.eviction": "rota.policy.prefill_delayer",
        "rota.policy.drains": "rota.policy.slot_policies.rotate",
    }
    for module, imported in imports.items():
        violate(copy, module, imported)
    violate(copy, "rota.cellar", "math")

    outcome = lint(copy)
    assert outcome.returncode == 1
    assert [edge for edge in imports.items() if f"{' -> '.join(edge)} (l." not in outcome.stdout] == []
    assert "not listed as layers:\n\n- rota.cellar\n" in outcome.stdout


@pytest.mark.parametrize(
    ("module", "imported"),
    [("rota.engine.model.spec", "rota.engine.lora.bank"), ("rota.engine.families.llama", "rota.engine.build")],
)
def test_a_circle_between_siblings_fails_the_contracts(copy, module, imported):
    violate(copy, module, imported)

    outcome = lint(copy)
    assert outcome.returncode == 1
    assert "No circle between siblings in any package BROKEN" in outcome.stdout


def test_the_untouched_copy_keeps_every_contract(copy):
    outcome = lint(copy)
    assert outcome.returncode == 0, outcome.stdout
