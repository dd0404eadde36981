"""A process that does one job at a time for the server takes no more memory than a job may need."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path

# How much address space one job may take beside what the process had before. The largest bodies need a third of it.
MEMORY_BYTES = 2 * 2**30


def limit_memory() -> None:
    """Let an allocation beyond the limit fail in this process, before the system kills another one."""
    if sys.platform != "linux":
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    with suppress(ValueError, OSError):  # a lower limit is in force already
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, resource.RLIM_INFINITY))
