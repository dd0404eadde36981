"""A traced device notes every step by the device's own clock: what it held, and when it began and ended there.

    host     submit 1   submit 2                 collect 1
    device   a1 | step 1         | b1 a2 | step 2       | b2      a and b: events in the stream

The host learns of a step's end late while it launches the next one kernel by kernel. The events do not: b - a is what
the step took, with its wait for an adapter's copy. a2 - b1 is how long the device had nothing to do.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from rota.core.ids import AdapterId, Row
from rota.core.messages import AdapterFailed, AdapterReady, Message
from rota.core.plan import StepPlan, StepResult

from .timed import Timed


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One step; times in seconds."""

    decodes: int
    prompt_tokens: int
    context_tokens: int
    adapters: int
    chunks: int
    pairs: int  # prompt tokens with the tokens before their chunks
    copies: int  # of its adapters that were under way when it was submitted
    others: int  # copies of other adapters that were under way
    queued: bool  # another step was in flight when this one was submitted
    submit_s: float  # the host's part
    step_s: float  # on the device
    idle_s: float  # the device, before this step
    told_s: float  # from its end on the device until the host had its tokens


@dataclass(slots=True)
class Mark:
    """A step under way."""

    counts: tuple[int, int, int, int, int, int, int, int, bool]
    submit_s: float
    began: Any
    ended: Any
    told_at: float = 0.0


@dataclass(slots=True)
class Clock:
    """A moment of the device's stream as the host's time; on a CPU both are the same."""

    has_gpu: bool = field(default_factory=torch.cuda.is_available)
    _first: Any = None
    _first_at: float = 0.0

    def now(self) -> Any:
        """To be read with `at` once the step behind it is done."""
        if not self.has_gpu:
            return time.monotonic()
        if self._first is None:
            torch.cuda.synchronize()
            self._first = torch.cuda.Event(enable_timing=True)
            self._first.record()
            self._first.synchronize()
            self._first_at = time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def at(self, moment: Any) -> float:
        if not self.has_gpu:
            return float(moment)
        moment.synchronize()
        return self._first_at + float(self._first.elapsed_time(moment)) / 1e3


@dataclass(slots=True)
class Traced(Timed):
    """Also counts copies: how long each took, and which steps may have waited for one."""

    copy_s: list[float] = field(default_factory=list)
    _clock: Clock = field(default_factory=Clock)
    _marks: list[Mark] = field(default_factory=list)
    _under_way: deque[Mark] = field(default_factory=deque)
    _adapter_of: dict[Row, AdapterId] = field(default_factory=dict)
    _copies: set[AdapterId] = field(default_factory=set)  # under way; a set's single operations are safe in threads

    def listen(self, post: Callable[[Message], None]) -> None:
        def note(message: Message) -> None:
            if isinstance(message, AdapterReady | AdapterFailed):
                self._copies.discard(message.adapter_id)
            if isinstance(message, AdapterReady):
                self.copy_s.append(message.copy_s)
            post(message)

        self.device.listen(note)

    def submit(self, plan: StepPlan) -> Any:
        self._adapter_of.update((seat.row, seat.adapter_id) for seat in plan.seats)
        self._copies.update(load.adapter_id for load in plan.loads)
        mark = Mark(self._counts(plan), 0.0, self._clock.now(), None)
        begun_at = time.monotonic()
        ticket = Timed.submit(self, plan)
        mark.submit_s = time.monotonic() - begun_at
        mark.ended = self._clock.now()
        self._under_way.append(mark)
        if plan.decodes or plan.chunks:
            self._marks.append(mark)
        return ticket

    def collect(self, ticket: Any) -> StepResult:
        result = Timed.collect(self, ticket)
        self._under_way.popleft().told_at = result.at
        return result

    def clear(self) -> None:
        """Forget what was noted so far."""
        self.steps.clear()
        self.copy_s.clear()
        self._marks.clear()

    def trace(self) -> list[TracedStep]:
        """The steps since `clear`; none may be in flight."""
        found, last_ended_at = [], None
        for mark in self._marks:
            began_at, ended_at = self._clock.at(mark.began), self._clock.at(mark.ended)
            idle_s = began_at - last_ended_at if last_ended_at is not None else 0.0
            last_ended_at = ended_at
            found.append(TracedStep(*mark.counts, mark.submit_s, ended_at - began_at, idle_s, mark.told_at - ended_at))
        return found

    def _counts(self, plan: StepPlan) -> tuple[int, int, int, int, int, int, int, int, bool]:
        users = {self._adapter_of[row] for row in (*plan.decodes, *(chunk.row for chunk in plan.chunks))}
        copies = set(self._copies)
        return (
            len(plan.decodes),
            sum(chunk.length for chunk in plan.chunks),
            plan.context_tokens,
            plan.adapters,
            len(plan.chunks),
            sum(chunk.start * chunk.length for chunk in plan.chunks),
            len(copies & users),
            len(copies - users),
            bool(self._under_way),
        )


def columns(steps: list[TracedStep]) -> dict[str, list[Any]]:
    """For a file: one list for each field."""
    rows = [asdict(step) for step in steps]
    return {name: [_short(row[name]) for row in rows] for name in TracedStep.__slots__}


def steps_of(table: dict[str, list[Any]]) -> list[TracedStep]:
    return [TracedStep(*values) for values in zip(*(table[name] for name in TracedStep.__slots__), strict=True)]


def _short(value: Any) -> Any:
    return round(value, 7) if isinstance(value, float) else value
