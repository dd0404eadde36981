"""What this process may use of its machine: a container grants less than there is."""

from __future__ import annotations

import os
from pathlib import Path

# Where Linux says what a container may use.
LIMITS = Path("/sys/fs/cgroup")


def usable_processors(found: int | None = None, limits: Path | None = None) -> int:
    """The processors whose time a container grants: "200000 100000" means two. At most `found`.

    Left out, `found` are those that this process may run on, which may be fewer than the machine has.
    """
    if found is None:
        found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = read_words((limits or LIMITS) / "cpu.max")
    if quota and quota[0].isdigit():
        return min(found, max(1, int(quota[0]) // int(quota[1])))
    return found


def read_words(path: Path) -> list[str]:
    """The words of a file of the system's; none if there is no such file."""
    try:
        return path.read_text().split()
    except OSError:
        return []
