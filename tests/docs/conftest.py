"""What the README starts, started as it says."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from docs.generate.pages import DOCS
from tests.processes import Program, started
from tests.waiting import line_of

README_PORT = 30000

# Starts a command of the README in a shell; further options are added to the environment.
Type = Callable[..., AbstractContextManager[Program]]


@pytest.fixture(scope="session")
def type_in(tmp_path_factory: pytest.TempPathFactory) -> Type:
    """A shell as the README's reader has it: in the repository, after `make serve`, with `rota` on its path."""
    # What `make` would install is what runs this test.
    home = tmp_path_factory.mktemp("venv")
    binaries = Path(sys.executable).parent
    (home / "bin").symlink_to(binaries)
    for stamp in (".serve", ".dev"):
        (home / stamp).touch()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    path = f"{binaries}{os.pathsep}{inherited['PATH']}"

    @contextmanager
    def type_in(command: str, folder: Path = DOCS.parent, **environment: str) -> Iterator[Program]:
        variables = {**inherited, "PATH": path, "VENV": str(home), "ARGS": "", **environment}
        with started(["bash", "-c", command], cwd=folder, env=variables) as shell:
            yield shell

    return type_in


@pytest.fixture(scope="package")
def readme_url(type_in: Type) -> Iterator[str]:
    """Where `make serve` serves: on the port that the README names, or on another where that one is taken."""
    with type_in("make serve", ARGS=port_option()) as server:
        yield line_of(server, "Rota serves ").split()[-1]
        os.killpg(server.pid, signal.SIGINT)  # as ctrl-C does
        server.wait()


def port_option() -> str:
    """What makes `rota` take another port than the README's, if that is taken."""
    try:
        socket.create_server(("127.0.0.1", README_PORT)).close()
    except OSError:
        return "--port 0"
    return ""
