"""Process stats are what Linux tells about a process: processor time, memory, open files, threads, its start."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PROC = Path("/proc")

# Fields of /proc/PID/stat behind the name of the program, as proc(5) counts them, less three.
_USER, _SYSTEM, _THREADS, _STARTED, _RESIDENT = 11, 12, 17, 19, 21


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStats:
    """One process at one moment."""

    cpu_s: float
    resident_bytes: int
    threads: int
    open_fds: int
    max_fds: float
    started_at: float  # seconds since 1970


def process_stats(pid: int | None, proc: Path = PROC) -> ProcessStats | None:
    """None if there is no such process, or if the system has no /proc."""
    if pid is None:
        return None
    folder = proc / str(pid)
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        ticks = os.sysconf("SC_CLK_TCK")
        return ProcessStats(
            cpu_s=(int(fields[_USER]) + int(fields[_SYSTEM])) / ticks,
            resident_bytes=int(fields[_RESIDENT]) * os.sysconf("SC_PAGE_SIZE"),
            threads=int(fields[_THREADS]),
            open_fds=len(os.listdir(folder / "fd")),
            max_fds=_max_fds(folder / "limits"),
            started_at=_boot_time(proc) + int(fields[_STARTED]) / ticks,
        )
    except OSError:
        return None


def _max_fds(limits: Path) -> float:
    line = next(line for line in limits.read_text().splitlines() if line.startswith("Max open files"))
    soft = line.split()[3]
    return float("inf") if soft == "unlimited" else float(soft)


@cache
def _boot_time(proc: Path) -> float:
    lines = (proc / "stat").read_text().splitlines()
    return float(next(line for line in lines if line.startswith("btime ")).split()[1])
