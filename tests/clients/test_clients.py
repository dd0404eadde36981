"""Clients of other projects, unchanged and of their newest versions, against `rota serve` with the built-in model.

Each is a program in `programs`, which runs in its family's environment and asserts what its client gives it.
Clients that measure are commands, which `benchmarks/clients/run.py` knows.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from benchmarks.clients.run import CLIENTS, prepare, run, words_of
from tests.clients.environment import ENVIRONMENTS, PROGRAMS, CannotInstallError, interpreter
from tests.processes import run_program, started
from tests.waiting import line_of

RUN_S = 900.0

pytestmark = pytest.mark.long("environments of 3.5 GB are made once, and each client asks a model on a CPU")


@pytest.fixture(scope="module")
def interpreter_of() -> Callable[[Path], Path]:
    @cache
    def made(family: Path) -> Path:
        try:
            return interpreter(family)
        except CannotInstallError as error:
            pytest.skip(f"the clients cannot be installed here: {error}")

    return made


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with started([sys.executable, "-m", "rota", "serve", "--port", "0"]) as server:
        yield line_of(server, "Rota serves ").split()[-1]


@pytest.mark.parametrize("program", sorted(PROGRAMS.glob("*/with_*")), ids=lambda path: str(path.relative_to(PROGRAMS)))
def test_a_client_works_unchanged(interpreter_of, url, program):
    done = run_program([interpreter_of(program.parent), program, url], check=False, timeout=RUN_S)

    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "works" in done.stdout


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_that_measures_comes_to_its_end_unchanged(url, name, tmp_path):
    with urllib.request.urlopen(f"{url}/server_info") as told:
        words = words_of(url, Path(json.load(told)["model_path"]))
    try:
        home = prepare(CLIENTS[name], ENVIRONMENTS)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"the client cannot be installed here: {error}")

    is_fine, shown = run(CLIENTS[name], home, words, tmp_path)

    assert is_fine, shown[-4000:]
