"""A process knows when it began: before its first line of Python ran, or when it was given its work."""

from __future__ import annotations

import os
import time
from pathlib import Path

# The field of /proc/PID/stat behind the name of the program, as proc(5) counts it, less three.
_STARTED = 19

_work_began_at: list[float] = []


def count_from_now() -> None:
    """What came before was no part of the process's work: it waited to be needed."""
    _work_began_at[:] = [time.monotonic()]


def process_began_at() -> float:
    """When this process began, on the monotonic clock; now, on a system that does not tell."""
    if _work_began_at:
        return _work_began_at[0]
    now = time.monotonic()
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[_STARTED]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):  # not Linux
        return now
    return now - max(0.0, age_s)
