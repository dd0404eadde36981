"""Clients of other projects, unchanged, against `rota serve` with the built-in model.

Each is a program in `programs`, which runs in an environment of its own and asserts what its client gives it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.environment import HERE, CannotInstallError, clients_python
from tests.processes import run_program, started
from tests.waiting import line_of

PROGRAMS = sorted((HERE / "programs").glob("with_*.py"))
RUN_S = 900.0

pytestmark = pytest.mark.long("an environment of 450 MB is made once, and each client asks a model on a CPU")


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return clients_python()
    except CannotInstallError as error:
        pytest.skip(f"the clients cannot be installed here: {error}")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with started([sys.executable, "-m", "rota", "serve", "--port", "0"]) as server:
        yield line_of(server, "Rota serves ").split()[-1]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_client_works_unchanged(python, url, program):
    done = run_program([python, program, url], check=False, timeout=RUN_S)

    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "works" in done.stdout
