"""A watch listens to one engine process until it is dead, and kills it once it is silent or stuck for too long."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import zmq

from rota.core.events import Event, Produced
from rota.core.standstill import StoodStill
from rota.runtime.timeouts import KILL_S, LOOK_S, EngineTimeouts, Silence, complaint_of
from rota.runtime.wire import Alive, Building, Failed, Ready, receive_all

# The signals by which a process ends that has damaged its own memory, or met a file that was cut while it was mapped.
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE})
# Records that a process sent before it died may still be on their way through the socket.
_LATE_S = 0.05

OnReady = Callable[[Ready], None]
OnEvents = Callable[[list[Event]], None]
OnWaiting = Callable[[str], None]


class Watched(Protocol):
    """A process, here or elsewhere, as `multiprocessing` shows its children."""

    @property
    def sentinel(self) -> int: ...

    @property
    def exitcode(self) -> int | None: ...

    def kill(self) -> None: ...

    def join(self, timeout: float | None = None) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """How an engine process ended: its last words if it had any, and how long it served."""

    last_words: str
    exit_code: int | None  # None: it was killed and has not ended yet
    served_s: float
    hung_at_once: bool = False  # it was killed for its silence before it had finished any step
    ending: str = ""  # why it ended, if that is known: its machine is gone
    failed: bool = False  # it hung, or an error ended it; not a kill from outside, nor lack of memory
    by_error: bool = False  # it said itself which one

    @property
    def is_own(self) -> bool:
        """Whether it may have died of what it read."""
        return self.failed and not self.ending

    @property
    def reason(self) -> str:
        if self.last_words or self.ending:
            return self.last_words or self.ending
        if self.exit_code is None:
            return "The engine process ended, and its exit code is not known."
        if self.exit_code < 0:
            return f"The engine process was killed by {signal.Signals(-self.exit_code).name}."
        return f"The engine process ended with exit code {self.exit_code}."


class Watch:
    """One process, from its start to its death; for the thread that started it."""

    def __init__(
        self,
        process: Watched,
        inbox: zmq.Socket[bytes],
        on_ready: OnReady,
        on_events: OnEvents,
        timeouts: EngineTimeouts,
        waiting: Callable[[], str] = str,
        on_waiting: OnWaiting | None = None,
        late_s: float = _LATE_S,
    ) -> None:
        """`waiting` says why the process has no place to run yet, and is empty once it has one. That may last, and is
        not the engine's silence; `on_waiting` is told whenever it changes."""
        self._late_s = late_s
        self._process = process
        self._inbox = inbox
        self._on_ready, self._on_events = on_ready, on_events
        self._silence = Silence(timeouts)
        self._poller = zmq.Poller()
        self._poller.register(inbox, zmq.POLLIN)
        self._poller.register(process.sentinel, zmq.POLLIN)
        self._waiting, self._on_waiting, self._waits = waiting, on_waiting, ""
        self._ready_at = math.inf
        self._last_words, self._failed = "", Failed("", is_own=False)
        self._was_killed, self._has_hung, self._made_steps, self._is_over = False, False, False, False

    def until_death(self) -> Death:
        """Pass on the process's records until it is dead; gives up on a killed process that does not end."""
        while not self._is_over:
            self._look()
        self._process.join(KILL_S)  # returns at once, unless the process cannot be killed
        return Death(
            last_words=self._last_words,
            exit_code=self._process.exitcode,
            served_s=max(0.0, time.monotonic() - self._ready_at),
            hung_at_once=self._has_hung and not self._made_steps,
            failed=self._has_failed(),
            by_error=bool(self._last_words) and not self._has_hung,
        )

    def _has_failed(self) -> bool:
        if self._last_words:
            return self._has_hung or self._failed.is_own
        return (self._process.exitcode or 0) > 0 or -(self._process.exitcode or 0) in _CRASHES

    def _look(self) -> None:
        self._ask_for_place()
        look_s = max(0.0, min(LOOK_S, self._silence.left_s))
        began_at = time.monotonic()
        polled = dict(self._poller.poll(math.ceil(look_s * 1000.0)))
        # If a look took longer than asked, this process was stopped too, and that time does not count.
        if not self._waits or self._was_killed:
            self._silence.spend(min(look_s, time.monotonic() - began_at))
        is_dead = self._process.sentinel in polled
        if polled:
            self._hear(receive_all(self._inbox, self._late_s if is_dead else 0.0))
        elif complaint := self._silence.complaint:
            self._time_out(complaint)
        self._is_over = self._is_over or is_dead

    def _ask_for_place(self) -> None:
        if (waits := self._waiting()) != self._waits:
            self._waits = waits
            if self._on_waiting:
                self._on_waiting(waits)

    def _hear(self, records: list[Any]) -> None:
        if not self._was_killed:
            self._silence.hear(records)
        events: list[Event] = []
        for record in records:
            match record:
                case Ready():
                    self._ready_at = time.monotonic()
                    self._on_ready(record)
                case Failed(reason):
                    self._failed = record
                    self._last_words = self._last_words or reason
                case Building() | Alive():
                    pass
                case event:
                    self._made_steps = self._made_steps or isinstance(event, Produced)
                    events.append(event)
        if events:
            self._on_events(events)
        stuck = [event for event in events if isinstance(event, StoodStill) and event.is_stuck]
        if stuck and not self._was_killed:
            self._time_out(complaint_of(stuck[0]))

    def _time_out(self, complaint: str) -> None:
        if self._was_killed:
            self._last_words += " It was killed and does not end."
            self._is_over = True
            return
        self._has_hung = not self._last_words
        self._last_words = self._last_words or complaint
        self._was_killed = True
        self._silence.limit(KILL_S)
        self._process.kill()
