"""Grammars are checked once each, by a few processes that keys share fairly."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path

from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.grammar import Grammar
from rota.server.access.keys import ANYONE
from rota.server.errors import RetryLater
from rota.server.grammar_checks.process import CheckProcess, Verdict
from rota.server.text_workers.waiting import Bounds, Waiting

# While one is ended and starts again, the other goes on.
PROCESSES = 2
LIMIT_S = 1.0
# Verdicts are kept by the digests of their grammars, so they are small.
KEPT = 4096
OF_KEY, OF_ALL = Bounds(32, 2 * 2**20), Bounds(256, 16 * 2**20)
_RETRY_AFTER_S = 1

Digest = bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One grammar that waits or is being checked. All who ask about it wait for the same `verdict`."""

    key: str
    text: str
    digest: Digest
    verdict: asyncio.Future[Verdict]

    @property
    def size(self) -> int:
        return len(self.text)


class GrammarChecks:
    """Lives on the event loop. The processes read the tokenizer of the model's folder."""

    def __init__(
        self,
        folder: Path,
        processes: int = PROCESSES,
        limit_s: float = LIMIT_S,
        of_key: Bounds = OF_KEY,
        of_all: Bounds = OF_ALL,
        kept: int = KEPT,
    ) -> None:
        self._processes = [CheckProcess(folder, limit_s) for _ in range(processes)]
        self._idle = list(reversed(self._processes))
        self._waiting: Waiting[Job] = Waiting(self._most_running, of_key, of_all)
        self._asked: dict[Digest, asyncio.Future[Verdict]] = {}
        self._kept = kept
        # The one that was asked for last at the end.
        self._known: OrderedDict[Digest, str] = OrderedDict()
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def start(self) -> None:
        """Make a process ready in the background, so that the first grammar does not wait for it."""
        self._processes[0].start()

    async def check(self, grammar: Grammar, key: str) -> None:
        """Raises RequestError for a grammar that no answer can follow, or that cannot be checked in time."""
        digest = blake2b(grammar.text.encode(), digest_size=16).digest()
        problem = self._known.get(digest)
        if problem is None:
            # The check goes on for others if this caller leaves.
            problem = (await asyncio.shield(self._asked.get(digest) or self._ask(grammar.text, digest, key))).problem
        else:
            self._known.move_to_end(digest)
        if self._is_closed:
            raise RequestError(Fault(FaultCode.STOPPING, "The server is stopping and takes no more requests."))
        if problem:
            raise RequestError.bad_field(grammar.param, f"{grammar.param} cannot be followed: {problem}")

    async def close(self) -> None:
        """End all processes. Calls that wait are refused, because the server is stopping."""
        self._is_closed = True
        for job in self._waiting.clear():
            job.verdict.set_result(Verdict())
        for process in self._processes:
            await asyncio.to_thread(process.close)

    def _most_running(self, key: str) -> int:
        count = len(self._processes)
        return count if key == ANYONE.name else max(1, count - 1)

    def _ask(self, text: str, digest: Digest, key: str) -> asyncio.Future[Verdict]:
        if not self._waiting.has_room(key, len(text)):
            message = "Too many grammars wait to be checked; try again in a second."
            raise RetryLater(Fault(FaultCode.QUEUE_FULL, message), _RETRY_AFTER_S)
        self._asked[digest] = asyncio.get_running_loop().create_future()
        self._waiting.add(Job(key=key, text=text, digest=digest, verdict=self._asked[digest]))
        self._start_jobs()
        return self._asked[digest]

    def _start_jobs(self) -> None:
        while self._idle and not self._is_closed and (job := self._waiting.take()):
            process = self._idle.pop()
            for other in self._idle[-1:]:
                other.start()  # so that it is ready when it is needed
            process.check(job.text).add_done_callback(partial(self._tell, asyncio.get_running_loop(), process, job))

    def _tell(self, loop: asyncio.AbstractEventLoop, process: CheckProcess, job: Job, done: Future[Verdict]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._finish, process, job, done)

    def _finish(self, process: CheckProcess, job: Job, done: Future[Verdict]) -> None:
        self._waiting.finished(job.key)
        self._idle.append(process)
        del self._asked[job.digest]
        if error := done.exception():
            job.verdict.set_exception(error)
        else:
            self._keep(job.digest, done.result())
            job.verdict.set_result(done.result())
        self._start_jobs()

    def _keep(self, digest: Digest, verdict: Verdict) -> None:
        if verdict.is_final:
            self._known[digest] = verdict.problem
            if len(self._known) > self._kept:
                self._known.popitem(last=False)
