"""A start is what a process hears and tells while it builds a device: it builds one, so it has one start."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rota.core.config import FirstAdapters
from rota.core.stages import AutotuneResult

# The field of /proc/PID/stat behind the name of the program, as proc(5) counts it, less three.
_STARTED = 19


def _unheard(_: str) -> None:
    """In a process without a supervisor nobody listens."""


@dataclass(slots=True)
class EngineStart:
    """What the engine's process knows and who hears it. The code that builds a device is far below who sets these."""

    # What the adapters to start with need, for an engine whose config lacks it. Blocks until the server has told, which
    # looks at thousands of folders meanwhile. Without a server that tells there are none: a follower asks rank 0.
    wait_for_first: Callable[[], FirstAdapters] = FirstAdapters
    # What engines before this one have tried out; once the device is built, also what this one has.
    autotuned: tuple[AutotuneResult, ...] = ()
    # The start goes on: a sign of life for the supervisor. From any thread.
    tell_progress: Callable[[str], None] = _unheard
    # The engine cannot go on. From any thread, also while the loop's own thread is stuck inside the device.
    end_with: Callable[[str], None] = _unheard
    # When a process that had waited to be needed was given its work; what came before was no part of that.
    work_began_at: float | None = None

    def began_at(self) -> float:
        """When the work began, on the monotonic clock: before the process's first line of Python ran, if that counts.

        On a system that does not tell it is now.
        """
        if self.work_began_at is not None:
            return self.work_began_at
        now = time.monotonic()
        try:
            fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
            age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[_STARTED]) / os.sysconf("SC_CLK_TCK")
        except (OSError, AttributeError):  # not Linux
            return now
        return now - max(0.0, age_s)


START = EngineStart()
