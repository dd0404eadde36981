"""The server's pause: it is told to every engine, it waits until they stand still, and it ends by itself in the end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Literal

from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.events import EngineRestarted, Event, PauseChanged
from rota.core.ids import EngineId
from rota.core.messages import Pause, Resume
from rota.runtime.service import Service
from rota.server.open_answers import OpenAnswers

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
