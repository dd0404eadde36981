"""Spares keeps one spare process for all engines of a server, and starts the next once all engines serve."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from rota.core.capacity import Capacity
from rota.machine import usable_processors
from rota.runtime.spare import Spare

LOG = logging.getLogger("rota.engine")

# So long the engines serve before the next spare starts. On two busy cores its imports made the first answer after a
# restart two seconds late; where there are many cores it takes none from the engines.
SETTLE_S, SETTLE_ON_MANY_S = 10.0, 1.0
MANY_CORES = 8

# The imports of a spare for an engine of this capacity, to be done in the spare; None: it is not worth one.
PrepareFor = Callable[[Capacity], Callable[[], None] | None]


def settling(cores: int) -> float:
    """Seconds until a spare starts, by the processors that this process may use."""
    return SETTLE_ON_MANY_S if cores >= MANY_CORES else SETTLE_S


class Spares:
    """One spare, however many engines: two engines rarely die together, and each spare takes memory.

    It is never started while an engine starts, nor while the requests that waited for one are served: cores may be few.
    A thread starts it, and lives until the last engine has ended: Linux ends a process with the thread that started it,
    and a spare may become the engine of a replica that outlives the others. From any thread.
    """

    def __init__(self, prepare_for: PrepareFor, settle_s: float | None = None) -> None:
        self._prepare_for = prepare_for
        self._settle_s = settling(usable_processors()) if settle_s is None else settle_s
        self._changed = threading.Condition()
        self._engines: dict[object, bool] = {}  # whether each of them serves
        self._settled_at = 0.0
        self._prepare: Callable[[], None] | None = None
        self._spare: Spare | None = None
        self._thread: threading.Thread | None = None

    @property
    def spare(self) -> Spare | None:
        """The one that waits, or still imports."""
        return self._spare

    def take(self, engine: object) -> Spare | None:
        """The spare for an engine that is about to start, if there is one that answers. Blocks, but not for long."""
        with self._changed:
            self._engines[engine] = False
            spare, self._spare = self._spare, None
        if spare is None or spare.answers():
            return spare
        why = "it does not answer" if spare.is_prepared else "it has not done its imports"
        LOG.info("The spare process is not used.", extra={"fields": {"pid": spare.process.pid, "why": why}})
        spare.end()
        return None

    def note_ready(self, engine: object, capacity: Capacity) -> None:
        """The engine serves from now on."""
        with self._changed:
            self._engines[engine] = True
            self._settled_at = time.monotonic() + self._settle_s
            self._prepare = self._prepare_for(capacity)
            if self._prepare and self._thread is None:
                self._thread = threading.Thread(target=self._keep, name="rota-spare", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def note_end(self, engine: object) -> None:
        """The engine's process has ended. With the last one the spare ends too."""
        with self._changed:
            self._engines.pop(engine, None)
            self._changed.notify_all()
            if self._engines:
                return
            spare, self._spare = self._spare, None
            thread, self._thread = self._thread, None
        if spare:
            spare.end()
        if thread:
            thread.join()

    def _keep(self) -> None:
        with self._changed:
            while self._thread is threading.current_thread():
                if self._prepare is None or self._spare or not all(self._engines.values()):
                    self._changed.wait()
                elif (left_s := self._settled_at - time.monotonic()) > 0.0:
                    self._changed.wait(left_s)
                else:
                    self._start(self._prepare)

    def _start(self, prepare: Callable[[], None]) -> None:
        try:
            self._spare = Spare(prepare)
        except OSError as error:  # no memory, or too many processes
            self._prepare = None  # until an engine is ready again
            LOG.warning("There is no spare process.", extra={"fields": {"why": str(error)}})
