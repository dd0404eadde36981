"""What the start of an engine has timed: its stages, and choices that a restart on the same machine need not repeat."""

from __future__ import annotations

import logging
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rota.core.stages import AutotuneResult, Choice, Stage

LOG = logging.getLogger("rota.start")

# ── stages ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# A recorder of stages: how long each part of building an engine takes, also of parts that run at the same time.


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
        """The block is a stage. A block that fails is none. The log is told of those that others wait for."""
        if threading.current_thread() is threading.main_thread():
            LOG.info("Starting: %s.", name)
        began_s = self._clock() - self._began_at
        yield
        self._note(name, began_s, self._clock() - self._began_at - began_s)

    def note_past(self, name: str) -> None:
        """All that has happened so far is a stage."""
        self._note(name, 0.0, self._clock() - self._began_at)

    def _note(self, name: str, began_s: float, took_s: float) -> None:
        with self._lock:
            self._stages.append(Stage(name, began_s, took_s))


# ── autotune results ────────────────────────────────────────────────────────────────────────────────────────────────
# They remember what the start of an engine has timed, so that a restart on the same machine times nothing again.

_in_use: ContextVar[AutotuneCache | None] = ContextVar("autotune cache", default=None)


class AutotuneCache:
    """Choices by name. The machine is a part of each name: another one times for itself."""

    def __init__(self, known: Iterable[AutotuneResult] = (), machine: str | None = None) -> None:
        self._machine = machine or platform.node()
        self._choices = {result.name: result.choice for result in known}

    @property
    def made(self) -> tuple[AutotuneResult, ...]:
        return tuple(AutotuneResult(name, choice) for name, choice in self._choices.items())

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside the block, `chosen` asks these."""
        token = _in_use.set(self)
        try:
            yield
        finally:
            _in_use.reset(token)

    def choose(self, name: str, find: Callable[[], Choice], fits: Callable[[Choice], bool]) -> Choice:
        full = f"{self._machine}: {name}"
        if full not in self._choices or not fits(self._choices[full]):
            self._choices[full] = find()
        return self._choices[full]


def chosen(name: str, find: Callable[[], Choice], fits: Callable[[Choice], bool]) -> Choice:
    """What was chosen before under this name, if it still fits; else what `find` finds by timing."""
    autotuned = _in_use.get()
    return find() if autotuned is None else autotuned.choose(name, find, fits)
