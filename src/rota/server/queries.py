"""An engine answers a query with an event at its next pass; a pause is told to every engine and waited for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Literal

from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.events import CacheFlushed, EngineRestarted, Event, Explained, Inspected, PauseChanged
from rota.core.ids import AdapterId, EngineId, RequestId
from rota.core.messages import Explain, FlushCache, Inspect, Pause, Query, Resume
from rota.runtime.service import Service
from rota.server.open_answers import OpenAnswers

# ── queries ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# An engine answers a query with an event at its next pass, or not in time if it is down or busy.
#
# A query about the whole service is answered by every engine that serves.

# Longer than the longest step of a small machine, and shorter than the timeout of scrapers.
TIMEOUT_S = 3.0
# How many times the time-out is spent if there is no earlier answer to fall back on.
FIRST_TRIES = 20
# So long a scrape waits for new numbers if there are some that are not older than FRESH_S.
QUICK_S = 0.002
FRESH_S = 0.25

# What is asked of all engines: their state, their numbers for a scrape, or to drop the KV of earlier prompts.
Topic = Literal["state", "numbers", "flush"]


class Gathering:
    """The answers of several engines to one query. Who asks the same before `until` waits for the same answers."""

    def __init__(self, asked: Iterable[EngineId], until: float) -> None:
        self._missing = {*asked}
        self._answers: dict[EngineId, Any] = {}
        self.until = until
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def answers(self) -> tuple[Any, ...]:
        """Those that have come, by engine."""
        return tuple(self._answers[engine_id] for engine_id in sorted(self._answers))

    def take(self, event: Inspected | CacheFlushed) -> None:
        self._answers[event.engine_id] = event
        self.expect_no_more(event.engine_id)

    def expect_no_more(self, engine_id: EngineId) -> None:
        """This engine has answered, or died with the query."""
        self._missing.discard(engine_id)
        if not self._missing and not self.done.done():
            self.done.set_result(None)


class Queries:
    """Sends queries and waits for answers, for a bounded time. Everything here runs on the event loop."""

    def __init__(self, service: Service, timeout_s: float = TIMEOUT_S) -> None:
        self._service = service
        self._timeout_s = timeout_s
        self._explaining: dict[RequestId, asyncio.Future[Explained | None]] = {}
        self._gathering: dict[Topic, Gathering] = {}
        # The last state that each engine sent, also if it came too late for its query.
        self._last: dict[EngineId, Inspected] = {}
        # The last numbers that each engine sent.
        self._numbers: dict[EngineId, Inspected] = {}

    @property
    def _engines(self) -> list[EngineId]:
        """Those that serve."""
        return [engine.engine_id for engine in self._service.state.engines if engine.capacity is not None]

    async def inspect(self) -> tuple[Inspected, ...]:
        """The state of each engine, by number. Engines that do not answer in time are left out."""
        asking = await self._ask_all("state", Inspect(time.monotonic()))
        return asking.answers if asking else ()

    async def inspect_or_recall(self) -> tuple[Inspected, ...]:
        """The state of each engine, or the last known one of an engine that is in a long step.

        Before an engine's first answer it waits longer. Empty without an engine.
        """
        found: dict[EngineId, Inspected] = {}
        for _ in range(FIRST_TRIES):
            answers = {one.engine_id: one for one in await self.inspect()}
            engines = self._engines
            found = {one: known for one in engines if (known := answers.get(one) or self._last.get(one))}
            if len(found) == len(engines):
                break
        return tuple(found.values())

    async def count(self, only: tuple[AdapterId, ...]) -> dict[EngineId, Inspected]:
        """The numbers of each engine that serves, for a scrape; an engine that does not answer in time is left out.

        A scraper that comes often gets the engine's last answer while a long step runs.
        """
        engines, now = self._engines, time.monotonic()
        is_known = all(self._is_fresh(one, now) for one in engines)
        if await self._ask_all("numbers", Inspect(now, only), QUICK_S if is_known else self._timeout_s) is None:
            return {}
        return {one: self._numbers[one] for one in engines if self._is_fresh(one, now)}

    def _is_fresh(self, engine_id: EngineId, now: float) -> bool:
        last = self._numbers.get(engine_id)
        return last is not None and last.at >= now - FRESH_S

    async def explain(self, request_id: RequestId) -> Explained | None:
        """Why a request waits. None without an answer in time."""
        if not self._engines:
            return None
        answer = self._explaining.get(request_id)
        if answer is None:
            answer = self._explaining[request_id] = asyncio.get_running_loop().create_future()
            if not self._send(Explain(request_id, time.monotonic())):
                self._explain(request_id, None)
        await asyncio.wait([answer], timeout=self._timeout_s)
        if self._explaining.get(request_id) is answer:
            # The engine may have died with the query, so the next caller sends a new one.
            del self._explaining[request_id]
        return answer.result() if answer.done() else None

    async def flush_cache(self) -> CacheFlushed | None:
        """Drop the KV of earlier prompts everywhere. None if an engine does not answer in time."""
        asking = await self._ask_all("flush", FlushCache(time.monotonic()))
        if asking is None or not asking.answers or not asking.done.done():
            return None
        return CacheFlushed(asking.answers[-1].at, sum(one.blocks for one in asking.answers))

    def observe(self, events: Iterable[Event]) -> None:
        for event in events:  # nearly always a step's tokens
            match event:
                case Explained(request_id=request_id):
                    self._explain(request_id, event)
                case Inspected(is_whole=False):
                    self._numbers[event.engine_id] = event
                    self._take("numbers", event)
                case Inspected():
                    self._last[event.engine_id] = event
                    self._take("state", event)
                case CacheFlushed():
                    self._take("flush", event)
                case EngineRestarted(engine_id=engine_id):
                    self._last.pop(engine_id, None)
                    self._numbers.pop(engine_id, None)
                    for gathering in self._gathering.values():
                        gathering.expect_no_more(engine_id)

    def _take(self, topic: Topic, event: Inspected | CacheFlushed) -> None:
        if gathering := self._gathering.get(topic):
            gathering.take(event)

    async def _ask_all(self, topic: Topic, query: Query, wait_s: float | None = None) -> Gathering | None:
        """Send a query, unless the same one is open, and wait for its answers. None without an engine.

        In a long step, those who ask again do not pile up queries.
        """
        engines, now, gathering = self._engines, time.monotonic(), self._gathering.get(topic)
        if gathering is None or gathering.done.done() or now >= gathering.until:
            if not engines or not self._send(query):
                return None
            gathering = self._gathering[topic] = Gathering(engines, now + self._timeout_s)
        await asyncio.wait([gathering.done], timeout=self._timeout_s if wait_s is None else wait_s)
        return gathering

    def _send(self, query: Query) -> bool:
        """False if the engines went down just now."""
        try:
            self._service.send(query)
        except RequestError:
            return False
        return True

    def _explain(self, request_id: RequestId, event: Explained | None) -> None:
        if answer := self._explaining.pop(request_id, None):
            answer.set_result(event)


# ── pausing ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# The server's pause: it is told to every engine, it waits until they stand still, and it ends by itself in the end.

LOG = logging.getLogger("rota.server")

# Stands in the place of the service's phase while it is paused.
PAUSED = "paused"

# vLLM's three: what becomes of open answers. They end with the tokens so far, or stand still, or are finished first.
Mode = Literal["abort", "keep", "wait"]


class Pausing:
    """Whether the server is paused. Everything here runs on the event loop."""

    def __init__(self, service: Service, answers: OpenAnswers) -> None:
        self._service = service
        self._answers = answers
        self.paused_at: float | None = None
        self._quiet: set[EngineId] = set()  # have told that no step of theirs is in flight
        self._news = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    async def begin(self, mode: Mode, max_s: float) -> None:
        """Pause for at most `max_s`; comes back once every engine stands still.

        Raises RequestError if the service is down, or if the server was resumed meanwhile.
        """
        if mode == "abort":
            for answer in self._answers:
                answer.cancel()
        self._service.send(Pause(time.monotonic(), is_drained=mode == "wait"))
        self.paused_at = self.paused_at or time.monotonic()
        self._quiet.clear()
        self._end_timer()
        self._timer = asyncio.get_running_loop().call_later(max_s, self._expire, max_s)
        await self._stand_still()

    def end(self) -> float:
        """Resume; gives how long the pause was. Raises RequestError if the service is down."""
        self._service.send(Resume(time.monotonic()))
        return self._forget()

    def observe(self, events: Iterable[Event]) -> None:
        """Also called without events, when an engine's state has changed."""
        if self.paused_at is None:
            return
        for event in events:
            match event:
                case PauseChanged(is_paused=True, engine_id=engine_id):
                    self._quiet.add(engine_id)
                case PauseChanged(engine_id=engine_id) | EngineRestarted(engine_id=engine_id):
                    self._quiet.discard(engine_id)
        self._news.set()

    async def _stand_still(self) -> None:
        while self.paused_at is not None and not self._is_quiet:
            self._news.clear()
            await self._news.wait()
        if self.paused_at is None:
            raise RequestError(Fault(FaultCode.NOT_PAUSED, "The server was resumed before it stood still."))

    @property
    def _is_quiet(self) -> bool:
        """Engines that do not serve have no step; they are paused as soon as they start."""
        return all(one.engine_id in self._quiet for one in self._service.state.engines if one.capacity is not None)

    def _expire(self, max_s: float) -> None:
        LOG.warning("The pause was not ended within %g seconds; the server goes on.", max_s)
        with suppress(RequestError):  # the service may be down
            self._service.send(Resume(time.monotonic()))
        self._forget()

    def _forget(self) -> float:
        paused_s = time.monotonic() - self.paused_at if self.paused_at is not None else 0.0
        self.paused_at = None
        self._end_timer()
        self._news.set()
        return paused_s

    def _end_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = None
