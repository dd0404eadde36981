"""The side of a room's owner: one of its processes, which is replaced if it dies or does not answer."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from rota.runtime.children import deaf_children
from rota.runtime.room.confinement import without_secrets
from rota.runtime.room.job import Job, Outcome, Prepare, Reply

LOG = logging.getLogger("rota.room")

# Python and its libraries are loaded in seconds; a busy machine may need many.
_START_S = 60.0
# A process keeps to its limits by itself. Only one that is stopped answers later than this.
_STUCK_S = 2.0


class RoomProcess:
    """For one thread, which lives as long: Linux ends the process with it. Only `kill` is for any thread."""

    def __init__(self, prepare: Prepare, argument: Any) -> None:
        self._orders = prepare, argument
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._is_ready = False
        self._is_closed = threading.Event()

    @property
    def pid(self) -> int | None:
        """None while it is not ready for a job."""
        return self._process.pid if self._process and self._is_ready else None

    def ready(self) -> None:
        """Start the process, if it does not run."""
        if self._connection is None and not self._is_closed.is_set():
            try:
                self._start()
            except (EOFError, OSError):
                self._end()  # a job will try again, and say so

    def reply(self, job: Job) -> Reply:
        self.ready()
        if self._connection is None:
            return Reply(Outcome.STOPPING if self._is_closed.is_set() else Outcome.DIED)
        connection = self._connection
        clock = threading.Timer(job.kind.wall_s + _STUCK_S, self._stop_waiting)
        clock.daemon = True
        try:
            clock.start()
            # Each of these calls may block. They fail when the process ends.
            connection.send_bytes(pickle.dumps((job.kind, len(job.parts))))
            for part in job.parts:
                connection.send_bytes(part)
            return Reply(Outcome(connection.recv_bytes().decode()), connection.recv_bytes())
        except (EOFError, OSError, RuntimeError):  # the last: no thread can be started
            self._end()
            return Reply(Outcome.STOPPING if self._is_closed.is_set() else Outcome.DIED)
        finally:
            clock.cancel()

    def kill(self) -> None:
        """For good; a job under way ends too."""
        self._is_closed.set()
        self._stop_waiting()

    def close(self) -> None:
        """Returns when the process has gone."""
        self._is_closed.set()
        self._end()

    def _stop_waiting(self) -> None:
        if process := self._process:
            with suppress(OSError):
                process.kill()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        # -P: what lies in the working folder is not imported.
        command = [sys.executable, "-P", "-m", "rota.runtime.room.worker", str(theirs.fileno()), str(os.getpid())]
        with theirs, deaf_children():
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env=without_secrets(dict(os.environ)),
                stdin=subprocess.DEVNULL,
            )
        self._connection = connection = Connection(ours.detach())
        if self._is_closed.is_set():
            self._stop_waiting()
        connection.send_bytes(pickle.dumps([path for path in sys.path if path]))
        connection.send_bytes(pickle.dumps(self._orders))
        if not connection.poll(_START_S):
            raise EOFError
        connection.recv_bytes()
        self._is_ready = True

    def _end(self) -> None:
        self._is_ready = False
        if self._connection:
            self._connection.close()
            self._connection = None
        if self._process:
            self._stop_waiting()
            self._process.wait()
            self._process = None
