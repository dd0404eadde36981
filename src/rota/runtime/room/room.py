"""The room shares a few processes between keys and between kinds of jobs, fairly and within bounds."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from rota.runtime.room.job import Job, Kind, Outcome, Prepare, Reply
from rota.runtime.room.process import RoomProcess
from rota.runtime.room.waiting import Waiting

LOG = logging.getLogger("rota.room")


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

    def submit(self, key: str, kind: Kind, *parts: bytes) -> Future[Reply]:
        """Raises FullError if too many jobs wait. A job whose future is cancelled in time is not done."""
        job = Job(key, kind, parts)
        with self._change:
            if self._is_closed:
                job.reply.set_result(Reply(Outcome.STOPPING))
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
            _settle(job, Reply(Outcome.STOPPING))

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
            if reply.outcome not in (Outcome.DONE, Outcome.STOPPING):
                LOG.warning("A job of %s was not done: %s %s.", job.kind.work.__name__, job.key, reply.outcome.value)
            _settle(job, reply)
        process.close()

    def _next(self, process: RoomProcess) -> Job | None:
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


def _settle(job: Job, reply: Reply) -> None:
    with suppress(InvalidStateError):  # its client's coroutine was cancelled
        job.reply.set_result(reply)
