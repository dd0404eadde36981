"""What the README starts, started as it says."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from docs.generate.pages import DOCS
from tests.docs.fences import blocks
from tests.processes import Program, started
from tests.waiting import line_of

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
    """Where the README's `rota serve` serves, on any port."""
    (block,) = (
        block for block in blocks((DOCS.parent / "README.md").read_text("utf-8"), "console") if "rota serve" in block
    )
    with type_in(f"{block.strip()} --port 0") as server:
        yield line_of(server, "Rota serves ").split()[-1]
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0
