"""What Linux says of a process and of its children."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds at a moment."""

    pid: int
    rss_mb: float
    files: int
    threads: int


def held_by(pid: int) -> Held:
    folder = Path(f"/proc/{pid}")
    rss_mb = int((folder / "statm").read_text().split()[1]) * _PAGE_BYTES / 1e6
    return Held(pid, round(rss_mb, 1), len(os.listdir(folder / "fd")), len(os.listdir(folder / "task")))


def files_of(pid: int) -> list[str]:
    """What its open files are, for the reader of a report."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found.append(os.readlink(link))
    return sorted(found)


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return sorted(found)


def engines_of(server: int) -> list[int]:
    """The children that compute. They are the only processes with torch's library, once they have loaded it."""
    found = []
    for child in children_of(server):
        with suppress(OSError):
            if "libtorch" in Path(f"/proc/{child}/maps").read_text():
                found.append(child)
    return found


def workers_of(server: int) -> list[int]:
    """The children that read large bodies, if there are any: neither an engine nor Python's resource tracker."""
    found = []
    for child in children_of(server):
        with suppress(OSError):
            folder = Path(f"/proc/{child}")
            if "spawn_main" in (folder / "cmdline").read_text() and "libtorch" not in (folder / "maps").read_text():
                found.append(child)
    return found


def state_of(pid: int) -> str:
    """One letter, as `ps` has it: Z is a zombie, T is stopped, X is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
