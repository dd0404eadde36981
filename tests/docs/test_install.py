"""What the page about installing tells people to type works as it stands, in a checkout and beside it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from pathlib import Path

import httpx
import pytest

from docs.generate.pages import DOCS
from rota.core.version import __version__
from tests.docs.fences import blocks
from tests.processes import run_program, started
from tests.waiting import line_of

BLOCKS = [block.strip() for block in blocks((DOCS / "install.md").read_text("utf-8"), "console")]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "dist", ".*_cache", ".hypothesis")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the repository whose development environment is the one that runs this."""
    shutil.copytree(DOCS.parent, tmp_path / "rota", ignore=LEFT_OUT)
    (tmp_path / "rota/.venv").mkdir()
    for part in ("bin", "lib", "pyvenv.cfg"):
        (tmp_path / "rota/.venv" / part).symlink_to(Path(sys.prefix) / part)
    for stamp in (".serve", ".dev"):
        (tmp_path / "rota/.venv" / stamp).touch()
    return tmp_path / "rota"


@pytest.mark.long("installs all that the wheel depends on from a package index, PyTorch included")
def test_its_commands_in_their_order_end_in_a_server_that_answers(checkout: Path):
    *commands, serve = BLOCKS
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PYTHONPATH"))}
    for command in commands:
        run_program(["bash", "-c", command], cwd=checkout, env=clean)
    with started(["bash", "-c", serve.replace("30000", "0")], cwd=checkout, env=clean) as server:
        url = line_of(server, "Rota serves ").split()[-1]
        answer = httpx.post(f"{url}/v1/completions", json={"model": "pirate", "prompt": "The sea", "max_tokens": 2})
        told = httpx.get(f"{url}/server_info").json()["version"]
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()

    assert serve.startswith("serving/bin/rota serve")
    assert answer.json()["usage"]["completion_tokens"] == 2
    assert told == __version__


def test_no_page_tells_a_command_that_installs_a_package_of_ours_by_its_name():
    """No index has it: what an index gave under that name would be a stranger's."""
    elsewhere = {".venv", ".venv-clients", "node_modules", "decisions"}
    pages = [path for path in DOCS.parent.rglob("*.md") if not elsewhere & set(path.parts)]
    told = [line for path in pages for line in path.read_text("utf-8").splitlines() if "pip install" in line]

    assert told
    assert [line for line in told if "rota" in line and not re.search("--find-links|dist/", line)] == []
