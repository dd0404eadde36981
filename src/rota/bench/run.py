"""A run sends a whole workload, each question at its time, and follows every answer in one event loop."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from rota.bench.backends import BACKENDS
from rota.bench.client import AnswerFailed, Server, ServerList, list_models
from rota.bench.config import BenchConfig
from rota.bench.questions import ClientQuestions, Question, Transient, Workload, read_workload, warmups
from rota.core.errors import ConfigError
from rota.core.events import Finished, FinishReason
from rota.core.ids import BASE, AdapterId
from rota.observe.summary import Recorder, spread


# No repr: asyncio.run asks its task for one at the end, and the repr of a million gaps takes a minute.
@dataclass(slots=True, repr=False)
class BenchRun:
    """One workload against one server. `recorder` and `problems` hold the results."""

    workload: Workload
    server: Server
    models: ServerList
    is_ignoring_eos: bool = True
    on_end: Callable[[], None] = lambda: None
    recorder: Recorder = field(default_factory=Recorder)
    problems: Counter[str] = field(default_factory=Counter)
    late_s: list[float] = field(default_factory=list)  # how late each question was sent
    started_at: float = 0.0

    def report(self) -> dict[str, Any]:
        """The simulator's summary, and the figures that only an HTTP client can measure."""
        return {
            **self.recorder.summary(self.workload.name_of),
            "late_s": spread(self.late_s),
            "problems": dict(self.problems.most_common()),
        }

    async def ask_all(self) -> None:
        self.started_at = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for client in self.workload.clients:
                tasks.create_task(self._send(client))
            for transient in self.workload.transients:
                self.recorder.transients.add(transient.question.adapter_id)
                tasks.create_task(self._ask_transient(transient))

    async def _send(self, client: ClientQuestions) -> None:
        gate = asyncio.Semaphore(client.max_concurrency) if client.max_concurrency else None
        async with asyncio.TaskGroup() as tasks:
            for question in client.questions:
                await self._wait_until(question.at)
                if gate:
                    await gate.acquire()
                else:
                    self.late_s.append(time.monotonic() - self.started_at - question.at)
                tasks.create_task(self._ask(question, self._adapter_of(question), gate))

    async def _ask(self, question: Question, adapter: str | None, gate: asyncio.Semaphore | None = None) -> None:
        body = self.server.backend.body(question, adapter, self.models.base, self.is_ignoring_eos)
        self.recorder.asked(question.request_id, question.adapter_id, time.monotonic())
        record = self.recorder.records[question.request_id]
        finished, problem = await self.server.ask(question.request_id, body, record, question.leaves_after_s)
        self.recorder.observe([finished])
        if problem:
            self.problems[problem] += 1
        if gate:
            gate.release()
        self.on_end()

    async def _ask_transient(self, transient: Transient) -> None:
        """Load a transient adapter, send it a question, and unload it, perhaps before its answer has ended."""
        await self._wait_until(transient.question.at)
        name = f"rota-bench-{transient.question.request_id}"
        path = self.models.path_of(self.workload.names[transient.host - 1])
        try:
            await self.server.tell(self.server.backend.load_path, {"lora_name": name, "lora_path": path})
        except AnswerFailed as error:
            self._note_refused(transient.question, str(error))
            return
        asking = asyncio.create_task(self._ask(transient.question, name))
        await asyncio.wait({asking}, timeout=transient.stays_s)
        await self._unload(name)
        await asking

    async def _unload(self, name: str) -> None:
        try:
            await self.server.tell(self.server.backend.unload_path, {"lora_name": name})
        except AnswerFailed as error:
            self.problems[str(error)] += 1

    def _note_refused(self, question: Question, problem: str) -> None:
        """A question that could not be sent has failed too."""
        now = time.monotonic()
        self.recorder.asked(question.request_id, question.adapter_id, now)
        self.recorder.observe([Finished(request_id=question.request_id, at=now, reason=FinishReason.FAILED)])
        self.problems[problem] += 1
        self.on_end()

    async def _wait_until(self, at: float) -> None:
        wait_s = self.started_at + at - time.monotonic()
        if wait_s > 0.0:
            await asyncio.sleep(wait_s)

    def _adapter_of(self, question: Question) -> str | None:
        return None if question.adapter_id == BASE else self.workload.name_of(question.adapter_id)


async def bench(config: BenchConfig, begin: Callable[[int], Callable[[], None]]) -> BenchRun:
    """Run a config's workload. `begin` gets the number of requests and returns a call for each request that ends."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=config.stall_timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=_headers(config), timeout=timeout) as session:
        server = Server(session, config.url, BACKENDS[config.backend])
        models = await list_models(server, config.model)
        workload = read_workload(config, models.adapters)
        for transient in workload.transients:
            models.path_of(workload.names[transient.host - 1])  # refuse a missing path before the run begins
        await _warm_up(config, server, models)
        run = BenchRun(workload, server, models, not config.disable_ignore_eos, begin(workload.requests))
        run.recorder.reader_pace = config.reader_pace
        await run.ask_all()
    return run


def _headers(config: BenchConfig) -> dict[str, str]:
    authorization = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    return {"Content-Type": "application/json", **authorization}


async def _warm_up(config: BenchConfig, server: Server, models: ServerList) -> None:
    recorder = Recorder()
    for question in warmups(config):
        recorder.asked(question.request_id, AdapterId(BASE), 0.0)
        body = server.backend.body(question, None, models.base, is_ignoring_eos=False)
        _, problem = await server.ask(question.request_id, body, recorder.records[question.request_id])
        if problem:
            raise ConfigError(f"The server at {server.url} does not answer a first short request: {problem}.")
