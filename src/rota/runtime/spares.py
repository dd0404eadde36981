"""Spares keeps one spare process for all engines of a server, and starts the next once all engines serve."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from rota.core.capacity import Capacity
from rota.machine import usable_processors
from rota.runtime.children import start_child
from rota.runtime.lifeline import die_with
from rota.runtime.timeouts import KILL_S
from rota.start import START

# ── spare ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# A spare is a process that has done an engine's imports and waits for its orders: it holds no device, only memory.

# What is said on the line between the two processes: a question, its answer, and that orders follow.
_ASKED, _HERE, _ORDERS = b"?", b"!", b">"
# A process that waits answers at once; a busy machine may let it wait. Its imports would take longer than this.
ANSWER_S = 1.0
# The engine and the server go first where cores are few.
_NICENESS = 10
# Linux ends such a process before any other once memory is short.
_FIRST_TO_GO = "1000"
_OOM = Path("/proc/self/oom_score_adj")

# A function of a module, with arguments that can be pickled.
Work = Callable[..., None]


class Spare:
    """The server's handle. The thread that makes it must live as long as the process may: Linux ends both together."""

    def __init__(self, prepare: Callable[[], None]) -> None:
        self._line, theirs = socket.socketpair()
        self._line.settimeout(ANSWER_S)
        self._is_prepared = False
        self.process = multiprocessing.get_context("spawn").Process(
            target=_wait, args=(pickle.dumps(prepare), theirs, os.getpid()), name="rota-engine", daemon=True
        )
        with theirs:  # not kept: else the end of the process would not end the line
            start_child(self.process)
        self._line.sendall(_ASKED)  # answered once the imports are done

    @property
    def is_prepared(self) -> bool:
        """Whether it has done its imports."""
        if not self._is_prepared and wait([self._line], 0.0):
            with suppress(OSError):  # the process is gone
                self._is_prepared = self._line.recv(1) == _HERE
        return self._is_prepared

    def answers(self) -> bool:
        """Whether it is prepared and neither dead nor stopped: it is asked. Blocks, but not for long."""
        try:
            if not self.is_prepared:
                return False
            self._line.sendall(_ASKED)
            return self._line.recv(1) == _HERE
        except OSError:
            return False

    def begin(self, work: Work, *arguments: Any) -> bool:
        """Let the process do this work, as its last. False: it does not listen any more, and was ended."""
        try:
            self._line.sendall(_ORDERS + pickle.dumps((work, arguments)))
        except OSError:  # without the whole orders it cannot have begun
            self.end()
            return False
        self._line.close()
        return True

    def end(self) -> None:
        """From any thread, and more than once."""
        self._line.close()
        self.process.kill()
        self.process.join(KILL_S)


def _wait(prepare: bytes, line: socket.socket, parent: int) -> None:
    die_with(parent)
    usual = _expendable()
    # In a thread, because a process without rights cannot take its own niceness back.
    imports = threading.Thread(target=_import_nicely, args=(prepare,), name="rota-imports")
    imports.start()
    imports.join()
    with line, line.makefile("rb") as heard:
        while (word := heard.read(1)) == _ASKED:
            line.sendall(_HERE)
        if word != _ORDERS:
            return  # the server is gone, or wants no spare any more
        work, arguments = pickle.load(heard)
    _set_oom(usual)
    START.work_began_at = time.monotonic()
    work(*arguments)


def _import_nicely(prepare: bytes) -> None:
    """Even to read `prepare` is an import. Imports that fail are tried again by the engine, which says why."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)  # on Linux: of this thread
    pickle.loads(prepare)()


def _expendable() -> str:
    """If memory runs short, better the spare than the engine beside it. Returns what held before."""
    with suppress(OSError):  # not Linux
        usual = _OOM.read_text().strip()
        _set_oom(_FIRST_TO_GO)
        return usual
    return ""


def _set_oom(score: str) -> None:
    """A process may always go back to the score that it began with."""
    if score:
        with suppress(OSError):
            _OOM.write_text(score)


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
        self.spare: Spare | None = None  # the one that waits, or still imports
        self._thread: threading.Thread | None = None

    def take(self, engine: object) -> Spare | None:
        """The spare for an engine that is about to start, if there is one that answers. Blocks, but not for long."""
        with self._changed:
            self._engines[engine] = False
            spare, self.spare = self.spare, None
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
            spare, self.spare = self.spare, None
            thread, self._thread = self._thread, None
        if spare:
            spare.end()
        if thread:
            thread.join()

    def _keep(self) -> None:
        with self._changed:
            while self._thread is threading.current_thread():
                if self._prepare is None or self.spare or not all(self._engines.values()):
                    self._changed.wait()
                elif (left_s := self._settled_at - time.monotonic()) > 0.0:
                    self._changed.wait(left_s)
                else:
                    self._start(self._prepare)

    def _start(self, prepare: Callable[[], None]) -> None:
        try:
            self.spare = Spare(prepare)
        except OSError as error:  # no memory, or too many processes
            self._prepare = None  # until an engine is ready again
            LOG.warning("There is no spare process.", extra={"fields": {"why": str(error)}})
