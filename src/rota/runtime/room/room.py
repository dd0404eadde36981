"""The room shares a few processes between keys and between kinds of jobs, fairly and within bounds."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from rota.runtime.children import deaf_children
from rota.runtime.room.confinement import without_secrets
from rota.runtime.room.job import JobOutcome, JobReply, Kind, Prepare, RoomJob

# ── waiting ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# Jobs wait in one queue for each key, and keys take turns.


class Waiting:
    """The jobs that wait, and how many run. Of the processes that a kind of jobs may have, a key leaves one to others.

    A key without a waiting job of a kind may add one of any size, however many jobs of other keys wait.
    """

    def __init__(self, processes: int, only_key: str) -> None:
        """`only_key` is the one that need not share."""
        self._processes, self._only_key = processes, only_key
        # In the order of turns: a key that had its turn goes to the end.
        self._by_key: dict[str, deque[RoomJob]] = {}
        self._running: Counter[tuple[Kind, str]] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._by_key.values()))

    def has_room(self, job: RoomJob) -> bool:
        """Whether one more job may wait."""
        alike = [one for one in self._all() if one.kind is job.kind]
        own = [one for one in alike if one.key == job.key]
        return not own or (job.kind.of_key.have_room(own, job.size) and job.kind.of_all.have_room(alike, job.size))

    def add(self, job: RoomJob) -> None:
        self._by_key.setdefault(job.key, deque()).append(job)

    def take(self) -> RoomJob | None:
        """The next job that may run. It counts as running until `finished`."""
        for key, jobs in self._by_key.items():
            if job := next(filter(self._may_run, jobs), None):
                jobs.remove(job)
                del self._by_key[key]
                if jobs:
                    self._by_key[key] = jobs
                self._running[job.kind, key] += 1
                return job
        return None

    def finished(self, job: RoomJob) -> None:
        self._running[job.kind, job.key] -= 1
        if not self._running[job.kind, job.key]:
            del self._running[job.kind, job.key]

    def clear(self) -> list[RoomJob]:
        """Takes out all jobs that wait."""
        jobs = list(self._all())
        self._by_key.clear()
        return jobs

    def _may_run(self, job: RoomJob) -> bool:
        places = max(1, self._processes - job.kind.spares)
        own = places if job.key == self._only_key else max(1, places - 1)
        alike = sum(count for (kind, _), count in self._running.items() if kind is job.kind)
        return alike < places and self._running[job.kind, job.key] < own

    def _all(self) -> Iterator[RoomJob]:
        return (job for jobs in self._by_key.values() for job in jobs)


# ── process ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# The side of a room's owner: one of its processes, which is replaced if it dies or does not answer.

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

    def reply(self, job: RoomJob) -> JobReply:
        self.ready()
        if self._connection is None:
            return JobReply(JobOutcome.STOPPING if self._is_closed.is_set() else JobOutcome.DIED)
        connection = self._connection
        clock = threading.Timer(job.kind.wall_s + _STUCK_S, self._stop_waiting)
        clock.daemon = True
        try:
            clock.start()
            # Each of these calls may block. They fail when the process ends.
            connection.send_bytes(pickle.dumps((job.kind, len(job.parts))))
            for part in job.parts:
                connection.send_bytes(part)
            return JobReply(JobOutcome(connection.recv_bytes().decode()), connection.recv_bytes())
        except (EOFError, OSError, RuntimeError):  # the last: no thread can be started
            self._end()
            return JobReply(JobOutcome.STOPPING if self._is_closed.is_set() else JobOutcome.DIED)
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


class FullError(Exception):
    """Too many jobs wait."""


class Room:
    """From any thread. Processes are started when they are first needed, the first one by `start`."""

    def __init__(self, prepare: Prepare, argument: Any = None, processes: int = 1, only_key: str = "") -> None:
        """`only_key` names jobs of a server without keys, which may have all processes."""
        self._orders, self._most = (prepare, argument), processes
        self._waiting = Waiting(processes, only_key)
        self._change = threading.Condition()
        self._processes: list[RoomProcess] = []
        self._threads: list[threading.Thread] = []
        self._idle = 0  # processes that have no job, ready or soon so
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        """Of the processes that are ready."""
        return [pid for process in self._processes if (pid := process.pid) is not None]

    def start(self) -> None:
        """Make a process ready in the background, so that the first job does not wait for it."""
        with self._change:
            if not self._threads and not self._is_closed:
                self._add_process()

    def submit(self, key: str, kind: Kind, *parts: bytes) -> Future[JobReply]:
        """Raises FullError if too many jobs wait. A job whose future is cancelled in time is not done."""
        job = RoomJob(key, kind, parts)
        with self._change:
            if self._is_closed:
                job.reply.set_result(JobReply(JobOutcome.STOPPING))
                return job.reply
            if not self._waiting.has_room(job):
                raise FullError
            self._waiting.add(job)
            if len(self._waiting) > self._idle and len(self._threads) < self._most:
                self._add_process()
            self._change.notify()
        return job.reply

    def close(self) -> None:
        """End all processes, also in the middle of a job, and wait until they have gone."""
        self.end()
        for thread in self._threads:
            thread.join()

    def end(self) -> None:
        """As `close`, but nothing is waited for: a garbage collector may call this in any thread."""
        with self._change:
            self._is_closed = True
            left = self._waiting.clear()
            self._change.notify_all()
        for process in self._processes:
            process.kill()
        for job in left:
            _settle(job, JobReply(JobOutcome.STOPPING))

    def _add_process(self) -> None:
        process = RoomProcess(*self._orders)
        thread = threading.Thread(target=self._serve, args=[process], name="rota-room", daemon=True)
        thread.start()
        self._processes.append(process)
        self._threads.append(thread)
        self._idle += 1

    def _serve(self, process: RoomProcess) -> None:
        while job := self._next(process):
            reply = process.reply(job)
            with self._change:
                self._waiting.finished(job)
                self._idle += 1
                self._change.notify_all()  # a job of the same key may run now
            if reply.outcome not in (JobOutcome.DONE, JobOutcome.STOPPING):
                LOG.warning("A job of %s was not done: %s %s.", job.kind.work.__name__, job.key, reply.outcome.value)
            _settle(job, reply)
        process.close()

    def _next(self, process: RoomProcess) -> RoomJob | None:
        """Waits for a job; None when the room is closed."""
        process.ready()  # first, also after its death: a process that is ready sooner takes the job
        with self._change:
            while not self._is_closed:
                if (job := self._waiting.take()) is None:
                    self._change.wait()
                elif job.reply.set_running_or_notify_cancel():
                    self._idle -= 1
                    return job
                else:
                    self._waiting.finished(job)  # its client has left
        return None


def _settle(job: RoomJob, reply: JobReply) -> None:
    with suppress(InvalidStateError):  # its client's coroutine was cancelled
        job.reply.set_result(reply)
