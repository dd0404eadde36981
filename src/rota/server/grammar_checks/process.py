"""The server's side of a process that checks grammars: a thread asks it, and ends it when it takes too long."""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

from rota.runtime.children import start_child
from rota.server.grammar_checks.worker import check_main

# Python, its libraries and the tokenizer are loaded in seconds; a busy machine may need many.
_START_S = 60.0


class Verdict:
    """What became of a check."""

    def __init__(self, problem: str = "", *, is_final: bool = True) -> None:
        """`is_final`: another check of the same grammar would say the same."""
        self.problem, self.is_final = problem, is_final


class CheckProcess:
    """One process. Its thread lives as long: Linux ends the process with it."""

    def __init__(self, folder: Path, limit_s: float) -> None:
        self._folder, self._limit_s = folder, limit_s
        self._thread = ThreadPoolExecutor(1, "rota-grammar-check")
        self._process: SpawnProcess | None = None
        self._connection: Connection | None = None
        self._refusal = ""
        self._closing = threading.Event()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Make it ready in the background. Without this call the first check waits for it."""
        with suppress(RuntimeError):  # it has been closed
            self._thread.submit(self._ready)

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
            return Verdict(self._answered(connection, text))
        except TimeoutError:
            self._end()
            self.start()
            return Verdict(f"it took longer than {self._limit_s:g} seconds to check. Make it smaller.", is_final=False)
        except (EOFError, OSError):
            self._end()
            return Verdict("the process that checked it died; it may need too much memory.", is_final=False)

    def _answered(self, connection: Connection, text: str) -> str:
        connection.send_bytes(text.encode())
        if not connection.poll(self._limit_s):
            raise TimeoutError
        return connection.recv_bytes().decode()

    def _ready(self) -> Connection | None:
        """The connection to the process, started if need be; None if the model has no grammars."""
        if self._connection or self._refusal or self._closing.is_set():
            return self._connection
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=check_main, args=(theirs, self._folder, os.getpid()), name="rota-grammar-check", daemon=True
        )
        start_child(process)
        theirs.close()  # else the end of the process would not end the connection
        self._process, self._connection = process, ours
        if self._closing.is_set():
            process.kill()
        if not ours.poll(_START_S):
            raise TimeoutError
        if refusal := ours.recv_bytes().decode():
            self._refusal = refusal
            self._end()
        return self._connection

    def _end(self) -> None:
        if self._connection:
            self._connection.close()
            self._connection = None
        if self._process:
            with suppress(OSError):
                self._process.kill()
            self._process.join()
            self._process = None
