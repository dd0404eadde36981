"""A test that hangs fails alone, one that takes long is left out by name, and the suite leaves no process behind."""

from __future__ import annotations

import ast
import os
import sys
import tomllib
import uuid
from pathlib import Path

import pytest

from tests.conftest import WALL_TIMES
from tests.processes import Done, is_alive, marked, run_program, started
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import TIMEOUT_S, line_of, until

ROOT = Path(__file__).parent.parent

HANGING = """
import asyncio, threading, uvloop

def test_that_waits_for_a_thread():
    threading.Event().wait()

def test_that_waits_in_an_event_loop():
    uvloop.run(asyncio.Event().wait())

def test_that_comes_after_them():
    pass
"""
BUSY = """
import subprocess, sys, time

def test_that_waits_for_longer_than_it_may_compute():
    time.sleep(2.5)

def test_whose_child_computes_for_ever():
    subprocess.run([sys.executable, "-S", "-c", "while True: pass"])
"""
LONG = """
import pytest

@pytest.mark.long("it counts to a million")
def test_that_takes_long():
    pass

def test_that_takes_a_moment():
    pass
"""


def pytest_on(content: str, folder: Path, *options: str) -> Done:
    """Runs pytest as the suite is run, on a file of its own."""
    file = folder / "test_it.py"
    file.write_text(content)
    plugins = ["-p", "pytest_timeout", "-p", "tests.conftest", "-p", "no:cacheprovider", "-o", "required_plugins="]
    command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", *plugins, *options, file]
    # The plugins that are installed besides would take longer to load than these tests take.
    return run_program(command, check=False, cwd=ROOT, env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})


def test_a_test_that_hangs_fails_alone_and_with_a_sentence(tmp_path):
    done = pytest_on(HANGING, tmp_path, "--timeout", "1")

    assert "2 failed, 1 passed" in done.stdout
    assert done.stdout.count("OverdueError: The test did not end within 1 seconds of processor time") >= 2
    assert "threading.Event().wait()" in done.stdout  # where it hung


def test_a_test_is_overdue_by_the_processor_time_of_its_children_and_not_by_waiting(tmp_path):
    done = pytest_on(BUSY, tmp_path, "--timeout", "2")

    assert "1 failed, 1 passed" in done.stdout
    assert "subprocess.run([sys.executable" in done.stdout


def test_every_test_has_a_limit_and_the_run_one_that_is_longer():
    options = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["pytest"]["ini_options"]

    assert TIMEOUT_S < WALL_TIMES * options["timeout"] < options["faulthandler_timeout"]
    assert options["faulthandler_exit_on_timeout"]


def test_long_tests_are_left_out_by_name_and_with_their_reason(tmp_path):
    said = pytest_on(LONG, tmp_path).stdout

    assert "1 passed, 1 deselected" in said
    assert "1 long tests were left out; `make test-long` runs them" in said
    assert "test_that_takes_long: it counts to a million" in said


def test_long_tests_that_are_asked_for_say_how_long_they_took_and_why(tmp_path):
    said = pytest_on(LONG, tmp_path, "-m", "long").stdout

    assert "1 passed, 1 deselected" in said
    assert "were left out" not in said
    assert "s  passed  " in said
    assert "test_that_takes_long: it counts to a million" in said


# What a test does: it starts a program, waits until the program is there, and goes on.
PARENT = """
import sys
from tests.processes import started
from tests.waiting import hang
with started(sys.argv[1:]) as program:
    print(next(line for line in program.stdout if line.startswith(("Rota serves", "here"))), flush=True)
    hang()
"""
ROTA = """
from functools import partial
from rota.cli import main
from rota.commands.serve import serve_model
from tests.fakes import FakeDevice

def make_device(_):
    return FakeDevice()

if __name__ == "__main__":
    main(serve=partial(serve_model, make_device=make_device))
"""
SLEEPER = "import signal; print('here', flush=True); signal.pause()"


def left_of(command: list[str | Path], folder: Path, **variables: str) -> list[int]:
    """The processes that outlive the one that started them, which is killed."""
    mark = uuid.uuid4().hex
    (folder / "parent.py").write_text(PARENT)
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": path, "ROTA_TEST_MARK": mark, **variables}
    with started([sys.executable, folder / "parent.py", *command], env=environment) as parent:
        line_of(parent)
        assert len(marked(mark)) > 1
        parent.kill()
        until(lambda: not marked(mark))
        return marked(mark)


def test_a_program_dies_with_the_test_run_that_started_it(tmp_path):
    assert left_of([sys.executable, "-c", SLEEPER], tmp_path) == []


def test_a_server_and_its_engine_die_with_the_test_run_that_started_make(tmp_path):
    model, binaries = write_byte_tokenizer(tmp_path / "tiny"), tmp_path / "bin"
    binaries.mkdir()
    (binaries / "python").symlink_to(sys.executable)
    (binaries / "rota").write_text(f"#!{sys.executable}\n{ROTA}")
    (binaries / "rota").chmod(0o755)
    (tmp_path / ".serve").touch()
    make = ["make", "--directory", str(ROOT), "serve"]

    assert left_of(make, tmp_path, VENV=str(tmp_path), ARGS=f"{model} --port 0", MAKEFLAGS="") == []


def test_a_program_whose_parent_has_gone_already_does_not_start():
    from rota.runtime import lifeline

    said = run_program([sys.executable, lifeline.__file__, "1", "echo", "started"], check=False)

    assert (said.returncode, said.stdout) == (1, "")


def test_a_program_dies_with_the_block_that_started_it():
    with started([sys.executable, "-c", SLEEPER]) as program:
        line_of(program)
        assert is_alive(program.pid)

    assert not is_alive(program.pid)


def calls_of_subprocess(file: Path) -> list[ast.Call]:
    text = file.read_text("utf-8")
    if not any(word in text for word in ("subprocess.", "os.spawn", "os.system")):
        return []  # as in nearly every file, which need not be parsed
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func).startswith(("subprocess.", "os.spawn", "os.system"))]


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "examples", "docs"])
def test_every_program_that_is_started_is_tied_to_the_one_that_starts_it(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    loose = [
        f"{file.relative_to(ROOT)}:{call.lineno}"
        for file in files
        for call in calls_of_subprocess(file)
        if not ast.unparse(call.args[0]).startswith("tied(")
    ]

    assert loose == []
