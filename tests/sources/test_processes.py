"""Processes that share one cache on disk: one download for all, and none reads half a file."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.processes import PIPE, Program, started
from tests.sources.hub_server import HubServer
from tests.sources.shelf import adapter_files
from tests.waiting import until

WEIGHTS = bytes(range(256)) * 4096
FILES = {**adapter_files(), "adapter_model.safetensors": WEIGHTS}


@contextmanager
def readers(folder: Path, count: int, most_bytes: int = 10**8) -> Iterator[list[Program]]:
    """Processes that are ready to ask."""
    command = [sys.executable, "-m", "tests.sources.reader_program", folder, str(most_bytes)]
    with ExitStack() as stack:
        programs = [stack.enter_context(started(command, stdin=PIPE)) for _ in range(count)]
        for program in programs:
            assert heard(program) == "ready"
        yield programs


def tell(program: Program, line: str) -> None:
    assert program.stdin is not None
    program.stdin.write(f"{line}\n")
    program.stdin.flush()


def heard(program: Program) -> str:
    assert program.stdout is not None
    return program.stdout.readline().strip()


def digests(files: Mapping[str, bytes]) -> str:
    return " ".join(f"{name}={hashlib.sha256(files[name]).hexdigest()}" for name in sorted(files))


def test_two_processes_that_ask_at_once_make_one_download(hub: HubServer, tmp_path: Path):
    hub.put("acme/legal", FILES)
    with readers(tmp_path, 2) as both:
        hub.may_read.clear()
        for one in both:
            tell(one, "hf://acme/legal")
        assert until(hub.downloads), "nobody began"
        hub.may_read.set()
        assert [heard(one) for one in both] == [digests(FILES)] * 2
    assert [name for name, _ in hub.downloads()] == ["adapter_config.json", "adapter_model.safetensors"]
    assert [path.suffix for path in tmp_path.iterdir()] == [""], "neither a lock nor a part is left"


def test_what_a_killed_process_has_left_is_gone_on_with(hub: HubServer, tmp_path: Path):
    hub.put("acme/legal", FILES)
    half = len(WEIGHTS) // 2
    with readers(tmp_path, 2) as (killed, other):
        hub.stops_after = half
        hub.may_go_on.clear()
        tell(killed, "hf://acme/legal")
        assert until(lambda: _size_of_parts(tmp_path) >= half), "half of it has not come"
        hub.stops_after = None
        tell(other, "hf://acme/legal")
        killed.kill()
        assert heard(other) == digests(FILES)
    assert hub.downloads()[-1] == ("adapter_model.safetensors", f"bytes={half}-{len(WEIGHTS) - 1}")
    assert [path.suffix for path in tmp_path.iterdir()] == [""]


def _size_of_parts(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.part/*.safetensors"))


@pytest.mark.parametrize("holds", [True, False])
def test_what_another_process_reads_is_not_removed_for_room(hub: HubServer, tmp_path: Path, holds: bool):
    for name in ("acme/one", "acme/two"):
        hub.put(name, {**FILES, "adapter_model.safetensors": WEIGHTS + name.encode()})
    with readers(tmp_path, 2, most_bytes=3 * len(WEIGHTS) // 2) as (first, second):
        tell(first, "hf://acme/one")
        assert heard(first)
        if not holds:
            _let_go(first)
        (folder,) = tmp_path.iterdir()
        tell(second, "hf://acme/two")
        assert heard(second)
        assert folder.exists(), "nothing leaves before the other is accepted"
        _let_go(second)
        assert folder.exists() is holds


def _let_go(program: Program) -> None:
    tell(program, "")
    tell(program, "hf://acme/none")  # its answer says that the hold before has ended
    assert heard(program).startswith("There is nothing")
