"""An environment of its own for clients of other projects, made once."""

from __future__ import annotations

import hashlib
import sys
import venv
from pathlib import Path

from tests.processes import run_program

HERE = Path(__file__).parent
FOLDER = HERE.parent.parent / ".venv-clients"
CONSTRAINTS = HERE / "constraints.txt"
CLIENTS = (
    "openai",
    "anthropic",
    "litellm",
    "mcp",  # litellm imports it where tools are used, and does not ask for it
    "langchain-openai",
    "instructor",
    "pydantic-ai-slim[openai]",
)
INSTALL_S = 3000.0


class CannotInstallError(Exception):
    """The package index cannot be reached, or does not have a package."""


def clients_python() -> Path:
    """The Python of the environment. It is made anew when the constraints change. Raises CannotInstallError."""
    python, stamp = FOLDER / "bin" / "python", FOLDER / ".made"
    wanted = hashlib.sha256(f"{sys.version}{CLIENTS}{CONSTRAINTS.read_text()}".encode()).hexdigest()
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    venv.create(FOLDER, with_pip=True, clear=True)
    flags = ("--quiet", "--disable-pip-version-check", "--constraint", CONSTRAINTS)
    done = run_program([python, "-m", "pip", "install", *flags, *CLIENTS], check=False, timeout=INSTALL_S)
    if done.returncode:
        raise CannotInstallError(done.stderr.strip().splitlines()[-1])
    stamp.write_text(wanted)
    return python
