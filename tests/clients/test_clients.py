"""Clients of other projects, unchanged and of their newest versions, against `rota serve` with the built-in model.

Each is a program in `programs`, which runs in its family's environment and asserts what its client gives it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.clients.environment import PROGRAMS, CannotInstallError, interpreter
from tests.processes import run_program, started
from tests.waiting import line_of

RUN_S = 900.0

pytestmark = pytest.mark.long("environments of 1.5 GB are made once, and each client asks a model on a CPU")


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
