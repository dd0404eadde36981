"""Watching a loop: a profiler over some of its steps, marks in the trace, and a clock around the scheduler."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from rota.core.plan import StepPlan
from rota.engine.engine import Engine

from .trace import MARK

SETTLING = 8  # steps before the first that counts


@dataclass(slots=True)
class Watch:
    """Profiles `steps` steps after some that it lets pass; a step counts if it holds what is looked for."""

    decodes: int
    chunks: int
    steps: int
    trace: dict[str, Any] | None = None
    _seen: int = 0
    _profiler: torch.profiler.profile | None = None

    def note(self, plan: StepPlan) -> None:
        """Before a step is submitted."""
        if len(plan.decodes) != self.decodes or len(plan.chunks) != self.chunks or self.trace is not None:
            return
        self._seen += 1
        if self._seen == SETTLING:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()
        elif self._seen == SETTLING + self.steps:
            self.stop()

    def stop(self) -> None:
        if self._profiler is None or self.trace is not None:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            self.trace = json.loads(path.read_text())


class Marked:
    """An engine whose submits are marks in the trace."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, plan: StepPlan) -> Any:
        with record_function(MARK):
            return self._engine.submit(plan)


@dataclass(slots=True)
class Clocked:
    """A scheduler that notes how long it plans and commits."""

    scheduler: Any
    plan_s: list[float] = field(default_factory=list)
    commit_s: list[float] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)

    def plan(self, now: float) -> StepPlan:
        begun_at = time.perf_counter()
        plan: StepPlan = self.scheduler.plan(now)
        self.plan_s.append(time.perf_counter() - begun_at)
        return plan

    def commit(self, *done: Any) -> Any:
        begun_at = time.perf_counter()
        events = self.scheduler.commit(*done)
        self.commit_s.append(time.perf_counter() - begun_at)
        return events
