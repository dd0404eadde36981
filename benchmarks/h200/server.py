"""A server as a benchmark sees it: started on options, given a scenario, asked how it fared."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rota.observe.summary import Recorder
from rota.workload.scenario import Scenario

from .shapes import ADAPTERS


@dataclass(frozen=True, slots=True)
class Asked:
    """What to start a server on: a folder of assets, and options by `rota serve`'s names."""

    folder: Path
    options: dict[str, Any]
    vocabulary: int
    adapter_count: int = ADAPTERS
    label: str = "server"  # of its files
    given: Mapping[str, Path] | None = None  # adapters by name, instead of those that were made

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def adapters(self) -> dict[str, Path]:
        """By name, in the order of their numbers; beyond those that were made, the same folders have other names."""
        if self.given is not None:
            return dict(self.given)
        made = [self.folder / f"adapter{number}" for number in range(1, ADAPTERS + 1)]
        return {f"adapter{number + 1}": made[number % ADAPTERS] for number in range(self.adapter_count)}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a scenario went; `problems` says what failed, and how often."""

    recorder: Recorder
    problems: dict[str, int]


class Server(Protocol):
    """Ready once it is made; `via` says how it is spoken to."""

    via: str
    start_s: float

    def run(self, scenario: Scenario, seed: int, limit_s: float) -> Outcome:
        """Blocks until the scenario is over; raises TimeoutError if it is not within `limit_s`."""
        ...

    def peak_rss_gb(self) -> float:
        """The most memory its processes have held, summed."""
        ...

    def stop(self) -> None: ...


def peak_rss_gb(pid: int) -> float:
    """The high-water mark of a process and all below it; one that has ended counts nothing."""
    total, pids = 0.0, [pid]
    for one in pids:
        try:
            total += int(Path(f"/proc/{one}/status").read_text().split("VmHWM:")[1].split()[0]) / 1e6
            for task in os.listdir(f"/proc/{one}/task"):
                pids += map(int, Path(f"/proc/{one}/task/{task}/children").read_text().split())
        except FileNotFoundError:
            continue
    return round(total, 2)
