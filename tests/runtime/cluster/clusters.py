"""For tests on a real Ray cluster: three nodes on this machine, which a test kills and adds as it likes."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.processes import PIPE, Program, marked, started
from tests.waiting import line_of, until

PROGRAM = Path(__file__).with_name("nodes_program.py")


class RayNodes:
    """The head, which is a node too, and further nodes by number."""

    def __init__(self, program: Program, mark: str) -> None:
        self._program, self._mark = program, mark
        self.address = line_of(program).strip()

    def add(self, **devices: int) -> None:
        """One node; without a word about its devices it has one processor."""
        self._order("add", json.dumps(devices or {"num_cpus": 1}, separators=(",", ":")))

    def remove(self, number: int) -> None:
        """As if its machine were gone: its processes are killed."""
        self._order("remove", str(number))

    def stop_head(self) -> None:
        self._order("stop-head")

    def start_head(self) -> None:
        self._order("start-head")

    def engines(self) -> list[int]:
        """The processes of engines on any node."""
        return [pid for pid in marked(self._mark) if b"spawn_main" in _command(pid)]

    def _order(self, *words: str) -> None:
        assert self._program.stdin is not None
        self._program.stdin.write(" ".join(words) + "\n")
        self._program.stdin.flush()
        line_of(self._program, "done")


@contextmanager
def ray_nodes(
    number: int = 3, port: int = 0, processors: int = 1, environ: dict[str, str] | None = None, **settings: Any
) -> Iterator[RayNodes]:
    """A cluster of so many nodes with so many processors each. With the block all its processes end."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # sockets lie there, and their paths must be short
    mark = f"ROTA_TEST_MARK={folder}"
    paths = os.pathsep.join(filter(None, sys.path))
    own = {"RAY_TMPDIR": folder, "PYTHONPATH": paths, "ROTA_TEST_MARK": folder, "RAY_USAGE_STATS_ENABLED": "0"}
    command: list[str | Path] = [sys.executable, PROGRAM, str(number), str(processors), str(port), json.dumps(settings)]
    with (Path(folder) / "words").open("w") as words:
        try:
            with started(command, stdin=PIPE, stderr=words, env=os.environ | own | (environ or {})) as program:
                yield RayNodes(program, mark)
            assert until(lambda: not marked(mark)), "every process of the cluster ends with it"
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
