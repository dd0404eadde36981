"""A spare is a process that has done an engine's imports and waits for its orders: it holds no device, only memory."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from rota.runtime.children import start_child
from rota.runtime.lifeline import die_with
from rota.runtime.patience import KILL_S
from rota.runtime.process_age import count_from_now

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
    count_from_now()
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
