"""A test that hangs fails alone, and a test that takes long is left out by name."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

from tests.conftest import WALL_TIMES
from tests.processes import Done, run_program
from tests.waiting import TIMEOUT_S

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
