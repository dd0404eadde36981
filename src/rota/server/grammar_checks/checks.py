"""Grammars are checked once each, by a few processes that keys share fairly."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.grammar import Grammar
from rota.server.access.keys import ANYONE
from rota.server.errors import RetryLater
from rota.server.grammar_checks.process import CheckProcess
from rota.server.grammar_checks.verdict import Verdict
from rota.server.text_workers.waiting import Bounds, Waiting

# One key never holds both.
PROCESSES = 2
# Verdicts are kept by the digests of their grammars, so they are small.
KEPT = 4096
OF_KEY, OF_ALL = Bounds(32, 2 * 2**20), Bounds(256, 16 * 2**20)
_RETRY_AFTER_S = 1

Digest = bytes
Result = TypeVar("Result")


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
        of_key: Bounds = OF_KEY,
        of_all: Bounds = OF_ALL,
        kept: int = KEPT,
    ) -> None:
        self._processes = [CheckProcess(folder) for _ in range(processes)]
        # The rest have not been needed yet. One joins the idle when it is ready, so no grammar waits for the
        # start of a second process while the first could check it.
        self._unstarted = list(reversed(self._processes))
        self._idle: list[CheckProcess] = []
        self._waiting: Waiting[Job] = Waiting(self._most_running, of_key, of_all)
        self._asked: dict[Digest, asyncio.Future[Verdict]] = {}
        self._kept = kept
        # The one that was asked for last at the end.
        self._known: OrderedDict[Digest, str] = OrderedDict()
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    @property
    def idle(self) -> int:
        """How many processes could check a grammar at once."""
        return len(self._idle)

    def start(self) -> None:
        """Make a process ready in the background, so that the first grammar does not wait for it."""
        if self._unstarted:
            self._make_ready(self._unstarted.pop())

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
        if not self._idle:
            self.start()
        self._start_jobs()
        return self._asked[digest]

    def _make_ready(self, process: CheckProcess) -> None:
        """Also if it cannot start: then its checks say so."""
        if process.pid is not None:
            self._is_ready(process)
        elif not self._is_closed:
            self._then(process.start(), lambda _: self._is_ready(process))

    def _is_ready(self, process: CheckProcess) -> None:
        self._idle.append(process)
        self._start_jobs()

    def _start_jobs(self) -> None:
        while self._idle and not self._is_closed and (job := self._waiting.take()):
            process = self._idle.pop()
            self._then(process.check(job.text), partial(self._finish, process, job))

    def _then(self, done: Future[Result], tell: Callable[[Future[Result]], None]) -> None:
        """Calls `tell` on the event loop, if that still runs."""
        loop = asyncio.get_running_loop()

        def hand_over(done: Future[Result]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(tell, done)

        done.add_done_callback(hand_over)

    def _finish(self, process: CheckProcess, job: Job, done: Future[Verdict]) -> None:
        self._waiting.finished(job.key)
        del self._asked[job.digest]
        if error := done.exception():
            job.verdict.set_exception(error)
        else:
            self._keep(job.digest, done.result())
            job.verdict.set_result(done.result())
        self._make_ready(process)

    def _keep(self, digest: Digest, verdict: Verdict) -> None:
        if verdict.is_final:
            self._known[digest] = verdict.problem
            if len(self._known) > self._kept:
                self._known.popitem(last=False)
