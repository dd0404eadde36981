"""The server's side of one worker process: a thread gives it jobs, and replaces it when it dies or takes too long."""

from __future__ import annotations

import logging
import pickle
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rota.core.errors import Fault, FaultCode
from rota.server.text_workers.job import Done, Order
from rota.server.text_workers.worker import worker_main
from rota.server.worker_process import WorkerProcess

LOG = logging.getLogger("rota.server")

# Python and its libraries are loaded in seconds; a busy machine may need many.
_START_S = 60.0

OnDone = Callable[[Done], None]


class TextWorker:
    """One worker process. Its thread lives as long: Linux ends the process with it."""

    def __init__(self, folder: Path, job_s: float) -> None:
        self._folder = folder
        self._job_s = job_s
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._process: WorkerProcess | None = None
        self._is_closed = False
        self._is_overdue = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="rota-text-worker", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def give(self, order: Order, raw: bytes, on_done: OnDone) -> None:
        """Start a job; does not block. `on_done` is called in the worker's thread."""
        self._tasks.put(partial(self._run, order, raw, on_done))

    def start(self) -> None:
        """Make it ready in the background, so that its first job does not wait for it."""
        self._tasks.put(self._ready)

    def close(self) -> None:
        """End the process, also in the middle of a job, and wait until it has gone."""
        self._is_closed = True
        self._tasks.put(None)
        if process := self._process:
            process.kill()
        self._thread.join()

    def _serve(self) -> None:
        while (task := self._tasks.get()) and not self._is_closed:
            task()
        self._end()

    def _run(self, order: Order, raw: bytes, on_done: OnDone) -> None:
        done = self._do(order, raw)
        if done.is_last:
            self._end()
        on_done(done)

    def _ready(self) -> None:
        try:
            self._start()
        except (EOFError, OSError):
            self._end()  # a job will try again, and say so

    def _do(self, order: Order, raw: bytes) -> Done:
        try:
            process = self._process or self._start()
            connection = process.connection
            with self._ended_after(process, self._job_s):
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
    def _ended_after(self, process: WorkerProcess, limit_s: float) -> Iterator[None]:
        """Kills the process if the block takes too long."""

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

    def _start(self) -> WorkerProcess:
        self._process = WorkerProcess(worker_main, self._folder, "rota-text-worker")
        if self._is_closed:
            self._process.kill()
        with self._ended_after(self._process, _START_S):
            self._process.connection.recv_bytes()  # it is ready
        return self._process

    def _end(self) -> None:
        if self._process:
            self._process.end()
            self._process = None
