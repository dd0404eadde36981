"""A snapshot is what one scrape shows: the meters, and what engines and the system tell at that moment."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from rota.core.adapter import OTHER_LABEL
from rota.core.capacity import Capacity
from rota.core.events import AdapterStanding, Inspected, SlotState
from rota.core.ids import FIRST_ENGINE, EngineId
from rota.observe.metric import counter, gauge
from rota.observe.metrics import Metrics

# ── process stats ───────────────────────────────────────────────────────────────────────────────────────────────────
# Process stats are what Linux tells about a process: processor time, memory, open files, threads, its start.

PROC = Path("/proc")

# Fields of /proc/PID/stat behind the name of the program, as proc(5) counts them, less three.
_USER, _SYSTEM, _THREADS, _STARTED, _RESIDENT = 11, 12, 17, 19, 21


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStats:
    """One process at one moment. Its metrics say whose it is: `metric_table` writes that before the names."""

    cpu_s: float = counter("cpu_seconds_total", "Processor time of the {whose} process.")
    resident_bytes: int = gauge("resident_memory_bytes", "Resident memory of the {whose} process.")
    open_fds: int = gauge("open_fds", "{files} of the {whose} process.")
    max_fds: float = gauge("max_fds", "Files that the {whose} process may have open.")
    threads: int = gauge("threads", "Threads of the {whose} process.")
    started_at: float = gauge("start_time_seconds", "When the {whose} process started, in seconds since 1970.")


Stats = Mapping[int, ProcessStats]  # by process


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


# ── snapshot ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """One engine at the moment of a scrape."""

    engine_id: EngineId = FIRST_ENGINE
    is_up: bool = gauge("rota_engine_up", "1 while the engine serves; 0 while it starts or is down.", True)
    is_given_up: bool = gauge(
        "rota_engine_given_up",
        "1 once the engine stays down, because it died too often; the other engines serve on.",
        False,
    )
    capacity: Capacity | None = None
    pid: int | None = None  # of an engine that has a process of its own
    inspected: Inspected | None = None  # None if the engine did not answer


def process_stats_of(reports: Iterable[EngineReport]) -> Stats:
    """What the system tells of the server's process and the engines'; for a thread, as it reads files."""
    pids = [os.getpid(), *(report.pid for report in reports if report.pid)]
    return {pid: stats for pid in pids if (stats := process_stats(pid))}


@dataclass(slots=True)
class StandingSums:
    """The sums of several standings."""

    waiting: int = gauge("rota_requests_waiting", "Requests in the queue.")
    running: int = gauge("rota_requests_running", "Requests that take part in steps.")
    parked: int = gauge("rota_requests_parked", "Requests that hold KV and do not run, for want of a slot or a row.")
    oldest_wait_s: float = gauge("rota_oldest_wait_seconds", "How long the longest waiting request has waited.")

    def add(self, one: AdapterStanding, now: float) -> None:
        self.waiting += one.waiting
        self.running += one.running
        self.parked += one.parked
        if one.oldest_at is not None:
            self.oldest_wait_s = max(self.oldest_wait_s, now - one.oldest_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """For the thread that moves the meters. With `wall_at`, in seconds since 1970, the picker's metrics are there."""

    metrics: Metrics
    reports: tuple[EngineReport, ...]
    stats: Stats = field(default_factory=dict)
    wall_at: float | None = None

    @property
    def inspected(self) -> list[Inspected]:
        """The answers of engines. Without one, the engines' own numbers are left out: older ones may be wrong."""
        return [report.inspected for report in self.reports if report.inspected]

    @property
    def capacities(self) -> list[Capacity]:
        """Of the engines that serve."""
        return [report.capacity for report in self.reports if report.capacity]

    def open_requests(self) -> dict[str, StandingSums]:
        """By an adapter's label, over all engines."""
        found = {one.label: StandingSums() for one in self.metrics.adapters.shown}
        now = self.inspected[-1].at
        for engine in self.inspected:
            for standing in engine.adapters:
                label = self.metrics.meters_of(standing.adapter_id).label
                found.setdefault(label, StandingSums()).add(standing, now)
            if engine.others and OTHER_LABEL in found:
                found[OTHER_LABEL].add(engine.others, now)
        return found

    def slot_states(self, engine_id: EngineId) -> list[SlotState]:
        return [change.state for change in self.metrics.slots.values() if change.engine_id == engine_id]

    def ready_and_waiting(self) -> tuple[str, str]:
        """For the picker, the names of the adapters that are ready in a slot of any engine, and of those that wait."""
        changes = self.metrics.slots.values()
        ready = {change.adapter_id for change in changes if change.state is SlotState.READY}
        wanted = {one for engine in self.inspected for one in engine.absent} | {one.adapter_id for one in changes}
        running, waiting = (map(self.metrics.name_of, sorted(ids)) for ids in (ready, wanted - ready))
        return _listed(running), _listed(waiting)


def _listed(names: Iterable[str | None]) -> str:
    """The picker would read a name with a comma as two names."""
    return ",".join([name for name in names if name and "," not in name])
