"""A recorder of stages: how long each part of building an engine takes, also of parts that run at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rota.core.stages import Stage


class StageRecorder:
    """From any thread."""

    def __init__(self, began_at: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Stages are counted from `began_at` on, when the process began; left out: from now on."""
        self._clock = clock
        self._began_at = clock() if began_at is None else began_at
        self._lock = threading.Lock()
        self._stages: list[Stage] = []

    @property
    def stages(self) -> tuple[Stage, ...]:
        with self._lock:
            return tuple(self._stages)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """The block is a stage. A block that fails is none."""
        began_s = self._clock() - self._began_at
        yield
        self._note(name, began_s, self._clock() - self._began_at - began_s)

    def note_past(self, name: str) -> None:
        """All that has happened so far is a stage."""
        self._note(name, 0.0, self._clock() - self._began_at)

    def _note(self, name: str, began_s: float, took_s: float) -> None:
        with self._lock:
            self._stages.append(Stage(name, began_s, took_s))
