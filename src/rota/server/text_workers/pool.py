"""The pool shares a few worker processes between keys, fairly and within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from rota.core.errors import Fault, FaultCode, RequestError
from rota.server.access.keys import ANYONE, Key
from rota.server.errors import RetryLater
from rota.server.prompts import TextLimits, Texts
from rota.server.text_workers.job import Done, Order
from rota.server.text_workers.process import TextWorker
from rota.server.text_workers.waiting import Bounds, Waiting
from rota.text.parsers import AS_THE_TEMPLATE_SAYS, Parsers
from rota.text.tokenizer import Tokenizer

Result = TypeVar("Result")

# More would take cores from the engine. The second is started when it is first needed.
WORKERS = 2
# The largest body of messages takes some seconds, and many on a busy machine. A template that never ends must not
# hold a worker for long.
JOB_S = 60.0
_RETRY_AFTER_S = 1
# Many clients may send long prompts at the same moment, so the bounds are wide. A body lies in memory while it waits.
OF_KEY, OF_ALL = Bounds(128, 64 * 2**20), Bounds(1024, 512 * 2**20)


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One body that waits or is being read."""

    key: str
    order: Order
    raw: bytes
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]

    @property
    def size(self) -> int:
        return len(self.raw)


class TextWorkers:
    """Lives on the event loop. A worker reads the tokenizer's folder. With keys, one worker is left for another key."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        workers: int = WORKERS,
        job_s: float = JOB_S,
        of_key: Bounds = OF_KEY,
        of_all: Bounds = OF_ALL,
    ) -> None:
        self._tokenizer, self._job_s = tokenizer, job_s
        self._most = workers
        self._workers: list[TextWorker] = []
        self._idle: list[TextWorker] = []
        self._waiting: Waiting[Job] = Waiting(self._most_running, of_key, of_all)
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers if worker.pid is not None]

    def start(self) -> None:
        """Make one worker ready in the background, so that the first large body does not wait for it."""
        worker = self._new_worker()
        worker.start()
        self._idle.append(worker)

    async def run(
        self,
        key: Key,
        work: Callable[[Texts, bytes], Result],
        limits: TextLimits,
        raw: bytes,
        parsers: Parsers = AS_THE_TEMPLATE_SAYS,
    ) -> Result:
        """What `work` makes of a body, in another process. Raises RequestError if it is refused, or cannot wait."""
        if self._is_closed:
            raise RequestError(_stopping())
        if not self._waiting.has_room(key.name, len(raw)):
            message = "Too many large bodies wait to be read; try again in a second."
            raise RetryLater(Fault(FaultCode.QUEUE_FULL, message), _RETRY_AFTER_S)
        loop = asyncio.get_running_loop()
        job = Job(key.name, Order(work, limits, parsers), raw, loop, loop.create_future())
        self._waiting.add(job)
        self._start_jobs()
        result: Result = await job.future
        return result

    async def close(self) -> None:
        """End all workers. Jobs that wait or run are refused, because the server is stopping."""
        self._is_closed = True
        for job in self._waiting.clear():
            _settle(job, Done(fault=_stopping()))
        for worker in self._workers:
            await asyncio.to_thread(worker.close)

    def _most_running(self, key: str) -> int:
        return self._most if key == ANYONE.name else max(1, self._most - 1)

    def _start_jobs(self) -> None:
        while (self._idle or len(self._workers) < self._most) and (job := self._waiting.take()):
            self._start(self._idle.pop() if self._idle else self._new_worker(), job)

    def _new_worker(self) -> TextWorker:
        worker = TextWorker(self._tokenizer.folder, self._job_s)
        self._workers.append(worker)
        return worker

    def _start(self, worker: TextWorker, job: Job) -> None:
        def on_done(done: Done) -> None:
            if not job.loop.is_closed():
                job.loop.call_soon_threadsafe(self._finish, worker, job, done)

        worker.give(job.order, job.raw, on_done)

    def _finish(self, worker: TextWorker, job: Job, done: Done) -> None:
        self._waiting.finished(job.key)
        self._idle.append(worker)
        _settle(job, Done(fault=_stopping()) if self._is_closed and done.fault else done)
        if not self._is_closed:
            self._start_jobs()


def _settle(job: Job, done: Done) -> None:
    if job.future.done():  # its client's coroutine was cancelled
        return
    if done.fault:
        job.future.set_exception(RequestError(done.fault))
    elif done.traceback:
        job.future.set_exception(RuntimeError(f"a text worker failed:\n{done.traceback}"))
    else:
        job.future.set_result(done.result)


def _stopping() -> Fault:
    return Fault(FaultCode.STOPPING, "The server is stopping and takes no more requests.")
