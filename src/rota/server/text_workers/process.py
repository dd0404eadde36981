"""The server's side of one worker process: a thread gives it jobs, and replaces it when it dies or takes too long."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

from rota.core.errors import Fault, FaultCode
from rota.runtime.children import start_child
from rota.server.text_workers.job import Done, Order
from rota.server.text_workers.worker import worker_main

LOG = logging.getLogger("rota.server")

# Python and its libraries are loaded in seconds; a busy machine may need many.
_START_S = 60.0

OnDone = Callable[[Done], None]
Task = tuple[Order, bytes, OnDone]


class TextWorker:
    """One worker process, started with its first job. The thread lives as long: Linux ends the process with it."""

    def __init__(self, folder: Path, job_s: float) -> None:
        self._folder = folder
        self._job_s = job_s
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._process: SpawnProcess | None = None
        self._connection: Connection | None = None
        self._is_closed = False
        self._is_overdue = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="rota-text-worker", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def give(self, order: Order, raw: bytes, on_done: OnDone) -> None:
        """Start a job; does not block. `on_done` is called in the worker's thread."""
        self._tasks.put((order, raw, on_done))

    def close(self) -> None:
        """End the process, also in the middle of a job, and wait until it has gone."""
        self._is_closed = True
        self._tasks.put(None)
        if process := self._process:
            process.kill()
        self._thread.join()

    def _serve(self) -> None:
        while (task := self._tasks.get()) and not self._is_closed:
            order, raw, on_done = task
            done = self._do(order, raw)
            if done.is_last:
                self._end()
            on_done(done)
        self._end()

    def _do(self, order: Order, raw: bytes) -> Done:
        try:
            connection = self._connection or self._start()
            with self._ended_after(self._job_s):
                # Each of these calls may block. They fail when the process ends.
                connection.send_bytes(pickle.dumps(order))
                connection.send_bytes(raw)
                done: Done = pickle.loads(connection.recv_bytes())
                return done
        except (EOFError, OSError):
            if self._is_overdue.is_set():
                message = f"Reading the body took longer than {self._job_s:g} seconds; send a smaller body."
                return self._failed(FaultCode.BODY_TOO_LARGE, message)
            message = "The process that read the body died; try again, or send a smaller body."
            return self._failed(FaultCode.TEXT_WORKER_DIED, message)

    @contextmanager
    def _ended_after(self, limit_s: float) -> Iterator[None]:
        """Kills the process if the block takes too long."""
        process = self._process
        assert process, "it was started"

        def end() -> None:
            self._is_overdue.set()
            process.kill()

        self._is_overdue.clear()
        timer = threading.Timer(limit_s, end)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _failed(self, code: FaultCode, message: str) -> Done:
        if not self._is_closed:
            LOG.warning("A text worker is replaced: %s", message)
        return Done(fault=Fault(code, message), is_last=True)

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        process = context.Process(
            target=worker_main, args=(theirs, self._folder, os.getpid()), name="rota-text-worker", daemon=True
        )
        start_child(process)
        theirs.close()  # else the end of the process would not end the connection
        self._process = process
        if self._is_closed:
            process.kill()
        with self._ended_after(_START_S):
            self._connection.recv_bytes()  # it is ready
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
