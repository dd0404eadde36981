"""The baton lets several loops share one virtual time: it goes to the loop whose next moment comes first.

Every loop runs unchanged in a thread of its own, and only the holder of the baton runs. Where a loop would wait, for a
message or for a step, its thread hands the baton on. So no loop acts before another loop's past, and the same run
happens every time.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol


class Runner(Protocol):
    """A loop that waits; `due_at` is when it can go on, as far as is known now."""

    @property
    def due_at(self) -> float: ...


class BrokenRunError(Exception):
    """Another loop of the same run has failed."""


class Baton:
    """`prepare` is called before the clock reaches a moment; it says whether it has changed what is due."""

    def __init__(self, prepare: Callable[[float], bool]) -> None:
        self._prepare = prepare
        self._running: dict[Runner, threading.Lock] = {}
        self._runners: Sequence[Runner] = ()
        self._places: dict[Runner, int] = {}
        # When each runner is due and its place, the first on top. An entry is what was known when it was made: one that
        # another has replaced, by `_known_due`, is thrown away at the top, and one that is due later by now sinks.
        self._heap: list[tuple[float, int]] = []
        self._known_due: list[float] = []
        self._is_broken = False

    def run(self, runners: Sequence[Runner], loops: Sequence[Callable[[], None]]) -> None:
        """Run one loop for each runner, until all have ended; raises what the first of them raised."""
        self._running = {runner: threading.Lock() for runner in runners}
        self._runners, self._places = runners, {runner: place for place, runner in enumerate(runners)}
        self._known_due = [runner.due_at for runner in runners]
        self._heap = [(due_at, place) for place, due_at in enumerate(self._known_due)]
        heapq.heapify(self._heap)
        for turn in self._running.values():
            turn.acquire()
        with ThreadPoolExecutor(len(loops)) as threads:
            futures = [threads.submit(self._play, *each) for each in zip(runners, loops, strict=True)]
            try:
                self._next()[1].release()
                errors = [error for future in futures if (error := future.exception())]
            finally:
                self._break()  # an interrupt ends all loops; loops that have ended do not notice
        for error in errors:
            if not isinstance(error, BrokenRunError):
                raise error

    def wait(self, runner: Runner) -> None:
        """Give way to all loops whose next moment comes before this one's."""
        self.note(runner)
        earliest, turn = self._next()
        if earliest is not runner:
            turn.release()
            self._await_turn(runner)

    def note(self, runner: Runner) -> None:
        """A runner may be due sooner than it was."""
        place = self._places.get(runner)
        if place is not None and (due_at := runner.due_at) != self._known_due[place]:
            self._known_due[place] = due_at
            heapq.heappush(self._heap, (due_at, place))

    def note_all(self) -> None:
        """Any runner may be due sooner than it was."""
        for runner in self._running:
            self.note(runner)

    def _play(self, runner: Runner, loop: Callable[[], None]) -> None:
        is_done = False
        try:
            self._await_turn(runner)
            loop()
            is_done = True
        finally:
            del self._running[runner]
            if not is_done:
                self._break()
            elif self._running:
                self._next()[1].release()

    def _await_turn(self, runner: Runner) -> None:
        self._running[runner].acquire()
        if self._is_broken:
            raise BrokenRunError

    def _next(self) -> tuple[Runner, threading.Lock]:
        while True:
            due_at, runner = self._first()
            if not self._prepare(due_at):
                return runner, self._running[runner]

    def _first(self) -> tuple[float, Runner]:
        heap = self._heap
        while True:
            known_due, place = heap[0]
            runner = self._runners[place]
            if known_due != self._known_due[place] or runner not in self._running:
                heapq.heappop(heap)
            elif (due_at := runner.due_at) != known_due:
                self._known_due[place] = due_at
                heapq.heapreplace(heap, (due_at, place))
            else:
                return due_at, runner

    def _break(self) -> None:
        self._is_broken = True
        for turn in list(self._running.values()):
            if turn.locked():
                turn.release()
