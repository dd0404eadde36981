"""A process that works for the server, one job at a time, and can be ended in the middle of one."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from rota.runtime.children import start_child
from rota.runtime.lifeline import die_with

# The engine and the event loop go first where cores are few.
_NICENESS = 5

# It serves until its connection ends, with the model's folder.
WorkerMain = Callable[[Connection, Path], None]


class WorkerProcess:
    """Started by the thread that makes it. Linux ends the process with that thread."""

    def __init__(self, main: WorkerMain, folder: Path, name: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(main, theirs, folder, os.getpid()), name=name, daemon=True)
        start_child(self._process)
        theirs.close()  # else the end of the process would not end the connection

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def kill(self) -> None:
        """From any thread; the connection ends too."""
        with suppress(OSError):
            self._process.kill()

    def end(self) -> None:
        """Returns when the process has gone."""
        self.connection.close()
        self.kill()
        self._process.join()


def _work(main: WorkerMain, connection: Connection, folder: Path, parent: int) -> None:
    die_with(parent)
    # Ctrl-C and SIGHUP reach the whole group, but only the server decides what they mean. SIGTERM must end this
    # process: Python sends it to what is left at the server's exit, and waits.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # One text at a time needs no threads, and each thread would reserve memory.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with suppress(OSError):
        os.nice(_NICENESS)
    with suppress(EOFError, ConnectionError):  # the server has gone
        main(connection, folder)
