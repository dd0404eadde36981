"""The server's side of a process that checks grammars: a thread asks it, and replaces it if it dies."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from rota.server.grammar_checks.copies import LIMIT_S
from rota.server.grammar_checks.verdict import DIED, Verdict, overdue
from rota.server.grammar_checks.worker import check_main
from rota.server.worker_process import WorkerProcess

# Python, its libraries and the tokenizer are loaded in seconds; a busy machine may need many.
_START_S = 60.0
# The process keeps to its limit by itself. Only one that is stopped answers later than this.
STUCK_S = LIMIT_S + 1.2


class CheckProcess:
    """One process. Its thread lives as long: Linux ends the process with it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, "rota-grammar-check")
        self._process: WorkerProcess | None = None
        self._refusal = ""
        self._closing = threading.Event()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> Future[object]:
        """Make it ready in the background, if it is not. A check that comes before waits for it."""
        return self._thread.submit(self._ready)

    def check(self, text: str) -> Future[Verdict]:
        """Start a check; does not block."""
        return self._thread.submit(self._check, text)

    def close(self) -> None:
        """End the process, also in the middle of a check, and wait until it has gone."""
        self._closing.set()
        if process := self._process:
            process.kill()
        with suppress(RuntimeError):  # it has been closed before
            self._thread.submit(self._end)
        self._thread.shutdown()

    def _check(self, text: str) -> Verdict:
        try:
            if (connection := self._ready()) is None:
                return Verdict(self._refusal, is_final=False)
            connection.send_bytes(text.encode())
            if connection.poll(STUCK_S):
                return Verdict.decoded(connection.recv_bytes())
        except (EOFError, OSError):
            self._end()
            return DIED
        self._end()
        return overdue(STUCK_S)

    def _ready(self) -> Connection | None:
        """The connection to the process, started if need be; None if the model has no grammars."""
        if self._process is None and not self._refusal and not self._closing.is_set():
            self._start()
        return self._process.connection if self._process else None

    def _start(self) -> None:
        self._process = process = WorkerProcess(check_main, self._folder, "rota-grammar-check")
        if self._closing.is_set():
            process.kill()
        try:
            if not process.connection.poll(_START_S):
                raise EOFError
            self._refusal = process.connection.recv_bytes().decode()
        except (EOFError, OSError):
            self._end()  # else the next check would read its first message
            raise
        if self._refusal:
            self._end()

    def _end(self) -> None:
        if self._process:
            self._process.end()
            self._process = None
