"""A fleet is several replicas in one virtual time, behind the router that serves them live."""

from __future__ import annotations

import heapq
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rota.core.events import Event, Finished, HostChanged, HostState, SlotChanged, SlotState
from rota.core.ids import AdapterId
from rota.core.messages import Abort, AddAdapter, Message, ServedElsewhere
from rota.core.plan import StepPlan, StepResult
from rota.core.request import Request
from rota.observe.summary import Recorder
from rota.policy.prefill_delayer import RankReport, on_board
from rota.runtime.loop import Emit, run
from rota.runtime.replicas.face import TenantQuotas
from rota.scheduler import Scheduler
from rota.sim.cost import LinearCost
from rota.sim.fronts import FleetRouter
from rota.sim.world import Finish, Mail, PagesOf, VirtualWorld

# ── baton ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# The baton lets several loops share one virtual time: it goes to the loop whose next moment comes first.
#
# Every loop runs unchanged in a thread of its own, and only the holder of the baton runs. Where a loop would wait,
# for a message or for a step, its thread hands the baton on. So no loop acts before another loop's past, and the same
# run happens every time.


class BrokenRunError(Exception):
    """Another loop of the same run has failed."""


class Baton:
    """`prepare` is called before the clock reaches a moment; it says whether it has changed what is due."""

    def __init__(self, prepare: Callable[[float], bool]) -> None:
        self._prepare = prepare
        self._running: dict[ReplicaWorld, threading.Lock] = {}
        self._runners: Sequence[ReplicaWorld] = ()
        self._places: dict[ReplicaWorld, int] = {}
        # When each runner is due and its place, the first on top. An entry is what was known when it was made: one that
        # another has replaced, by `_known_due`, is thrown away at the top, and one that is due later by now sinks.
        self._heap: list[tuple[float, int]] = []
        self._known_due: list[float] = []
        self._is_broken = False

    def run(self, runners: Sequence[ReplicaWorld], loops: Sequence[Callable[[], None]]) -> None:
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

    def wait(self, runner: ReplicaWorld) -> None:
        """Give way to all loops whose next moment comes before this one's."""
        self.note(runner)
        earliest, turn = self._next()
        if earliest is not runner:
            turn.release()
            self._await_turn(runner)

    def note(self, runner: ReplicaWorld) -> None:
        """A runner may be due sooner than it was."""
        place = self._places.get(runner)
        if place is not None and (due_at := runner.due_at) != self._known_due[place]:
            self._known_due[place] = due_at
            heapq.heappush(self._heap, (due_at, place))

    def note_all(self) -> None:
        """Any runner may be due sooner than it was."""
        for runner in self._running:
            self.note(runner)

    def _play(self, runner: ReplicaWorld, loop: Callable[[], None]) -> None:
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

    def _await_turn(self, runner: ReplicaWorld) -> None:
        self._running[runner].acquire()
        if self._is_broken:
            raise BrokenRunError

    def _next(self) -> tuple[ReplicaWorld, threading.Lock]:
        while True:
            due_at, runner = self._first()
            if not self._prepare(due_at):
                return runner, self._running[runner]

    def _first(self) -> tuple[float, ReplicaWorld]:
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


# ── exchanges ───────────────────────────────────────────────────────────────────────────────────────────────────────
# Exchanges carry the prefill delayer's reports between replicas in virtual time: a board, or an all-gather.
#
# The live ones are in `runtime/replicas/exchange`. Here no rank dies, so what is left is who waits for whom.


class LooseRanks:
    """No rank waits: each goes by what the others said last."""

    def __init__(self) -> None:
        self._lines: dict[int, RankReport] = {}

    def share(self, rank: int, report: RankReport) -> list[RankReport]:
        own = self._lines[rank] = report._replace(rank=rank)
        return on_board(own, [line for other, line in self._lines.items() if other != rank])


@dataclass(slots=True, kw_only=True)
class Round:
    """A pass that all ranks make together, and the step behind it: that lasts as long as the longest rank's."""

    reports: dict[int, RankReport] = field(default_factory=dict)
    said_at: float = -math.inf  # when the last rank that has come so far came
    done_at: float = 0.0  # when the steps of all ranks are done
    is_complete: bool = False


class LockstepRanks:
    """All ranks make every pass together, idle ones too, as ranks do that share collectives."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._round = Round()

    @property
    def called_at(self) -> float:
        """When a rank that has not come was called by the first that has; never, if none has."""
        return self._round.said_at if self._round.reports else math.inf

    def share(self, rank: int, world: ReplicaWorld, report: RankReport) -> list[RankReport]:
        """Waits until all ranks have come."""
        round = self._round
        round.reports[rank] = report._replace(rank=rank)
        round.said_at = max(round.said_at, world.now())
        if len(round.reports) == self._ranks:
            round.is_complete = True
            self._round = Round()
        world.wait_for(round)
        return [round.reports[number] for number in sorted(round.reports)]


# ── replica world ───────────────────────────────────────────────────────────────────────────────────────────────────
# A replica has a virtual world beside others: where it would jump ahead, it first lets the others come as far.


class ReplicaWorld(VirtualWorld):
    """Waits for messages, for steps, and in a gathering for the other ranks; `due_at` says until when."""

    def __init__(
        self,
        number: int,
        baton: Baton,
        costs: LinearCost,
        fetch_s: float,
        exchange: LooseRanks | LockstepRanks | None,
        pages_of: PagesOf | None = None,
    ) -> None:
        super().__init__((), costs, fetch_s=fetch_s, pages_of=pages_of)
        self._number = number
        self._baton = baton
        self._exchange = exchange
        self._until = 0.0
        self._step: Finish | None = None  # while the loop waits for a step
        self._awaited: Round | None = None  # while the loop waits for the other ranks
        self._round: Round | None = None  # the last that this rank was in
        self._flying: deque[Round] = deque()  # whose steps are in flight

    @property
    def due_at(self) -> float:
        """When the loop that waits can go on, as far as is known now."""
        if self._awaited is not None:
            return max(self._now, self._awaited.said_at) if self._awaited.is_complete else math.inf
        if self._step is not None:
            return max(self._now, self._done_at(self._step))
        called_at = self._exchange.called_at if isinstance(self._exchange, LockstepRanks) else math.inf
        return max(self._now, min(self.next_at, self._until, called_at))

    def post(self, at: float, message: Message) -> None:
        super().post(at, message)
        self._baton.note(self)

    def receive(self, until: float) -> list[Message] | None:
        self._until = until
        self._baton.wait(self)
        return super().receive(min(until, self.due_at))

    def submit(self, plan: StepPlan) -> Finish:
        finish = super().submit(plan)
        if self._round is not None:
            self._round.done_at = max(self._round.done_at, finish[0])
            self._flying.append(self._round)
        return finish

    def collect(self, ticket: Finish) -> StepResult:
        self._step = ticket
        self._baton.wait(self)
        self._step, done_at = None, self._done_at(ticket)
        if self._flying:
            self._flying.popleft()
        return super().collect((done_at, ticket[1], ticket[2]))

    def _done_at(self, ticket: Finish) -> float:
        """When a step is done; ranks that make their passes together also end their steps together."""
        return max(ticket[0], self._flying[0].done_at) if self._flying else ticket[0]

    def share(self, report: RankReport) -> list[RankReport]:
        if isinstance(self._exchange, LockstepRanks):
            return self._exchange.share(self._number, self, report)
        return self._exchange.share(self._number, report) if self._exchange else [report]

    def wait_for(self, round: Round) -> None:
        self._awaited = round
        self._baton.note_all()  # it calls the others, or is the last one that they wait for
        self._baton.wait(self)
        self._awaited = None
        self._now = max(self._now, round.said_at)
        if self._round is not None:
            # All ranks have planned again, so all have given the device their steps of the round before.
            self._device_free_at = max(self._device_free_at, self._round.done_at)
        self._round = round


# ── replica results ─────────────────────────────────────────────────────────────────────────────────────────────────
# Replica results are what one replica of several did: its requests as their clients saw them, its loads and reads.


@dataclass(slots=True, kw_only=True)
class ReplicaResults:
    """Follows the events of one replica; reads before `since` are those that adapters were added with."""

    since: float
    recorder: Recorder = field(default_factory=Recorder)
    loads: int = 0  # copies into slots
    reads: int = 0  # from disk into host memory

    def observe(self, events: Iterable[Event]) -> None:
        for event in events:
            kind = type(event)
            if kind is SlotChanged:
                self.loads += event.state is SlotState.LOADING  # type: ignore[union-attr]
            elif kind is HostChanged:
                self.reads += event.state is HostState.READING and event.at >= self.since  # type: ignore[union-attr]
        self.recorder.observe(events)

    def summary(self) -> dict[str, Any]:
        found = self.recorder.summary()
        del found["adapters"]  # a request's adapter is in the summary of all replicas
        return {**found, "loads": self.loads, "reads": self.reads}


class Fleet:
    """Replicas with their schedulers and worlds; `mail` is what clients send to all of them together.

    A request goes to the replica that the router chooses when the request arrives. The router knows every event at
    once. What is about an adapter goes to all replicas.
    """

    def __init__(
        self,
        mail: Mail,
        router: FleetRouter,
        replicas: int,
        costs: LinearCost,
        fetch_s: float,
        gathers: bool | None = None,
        adds_on_demand: bool = False,
        pages_of: PagesOf | None = None,
    ) -> None:
        """`gathers` is about the replicas' prefill delayers: whether they wait for each other; None: there are none.

        `adds_on_demand`: a replica hears of an adapter with the first request for it that goes there. Ten thousand
        adapters on 512 replicas are five million reads before the first request, and as many records. A replica that is
        told late reads the adapter when it is asked for, as it does live if host memory has lost it since the start.
        """
        self._mail = mail
        self._adds_on_demand = adds_on_demand
        # Adapters that may be asked for, and the replicas that know them by now.
        self._expected: dict[AdapterId, AddAdapter] = {}
        self._known: set[tuple[int, AdapterId]] = set()
        self._router = router
        self._quotas = TenantQuotas()
        self._front_s = costs.front_s
        self._baton = Baton(self._deliver)
        exchange = None if gathers is None else LockstepRanks(replicas) if gathers else LooseRanks()
        self.worlds = [
            ReplicaWorld(number, self._baton, costs, fetch_s, exchange, pages_of) for number in range(replicas)
        ]
        self.results: list[ReplicaResults] = []  # of each replica

    def run(self, schedulers: Sequence[Scheduler], emit: Emit, depth: int, starts_at: float) -> None:
        """Serve until all mail is answered; `emit` gets the events of all replicas. Clients begin at `starts_at`."""
        self.results = [ReplicaResults(since=starts_at) for _ in schedulers]
        loops: list[Callable[[], None]] = [
            partial(run, scheduler, world, partial(self._emit, number, emit), depth)
            for number, (scheduler, world) in enumerate(zip(schedulers, self.worlds, strict=True))
        ]
        self._baton.run(self.worlds, loops)

    def _deliver(self, by: float) -> bool:
        """Give the replicas the messages of the next moment, if that is not later; False if there are none."""
        at = self._mail.next_at
        if at > by or at == math.inf:
            return False
        for message in self._mail.take(at):
            if self._adds_on_demand and isinstance(message, AddAdapter):
                self._expected[message.adapter.adapter_id] = message
                continue
            for number in self._receivers(message, at):
                self.worlds[number].post(at, message)
        return True

    def _receivers(self, message: Message, at: float) -> Sequence[int]:
        if isinstance(message, Request):
            number = self._router.route(message, at).replica
            self._quotas.send(message, number)
            self.results[number].recorder.asked(message.request_id, message.adapter_id, at - self._front_s)
            self._introduce(number, message.adapter_id, at)
            return (number,)
        if isinstance(message, Abort):
            found = self._router.replica_of(message.request_id)
            return () if found is None else (found,)
        return range(len(self.worlds))

    def _introduce(self, number: int, adapter_id: AdapterId, at: float) -> None:
        """A request goes to a replica, which must hear of the adapter before."""
        if adapter_id in self._expected and (number, adapter_id) not in self._known:
            self._known.add((number, adapter_id))
            self.worlds[number].post(at, replace(self._expected[adapter_id], at=at))

    def _emit(self, number: int, emit: Emit, events: list[Event]) -> None:
        self._router.note_events(number, events)
        for event in events:
            if isinstance(event, Finished):
                self._end(number, event)
        self.results[number].observe(events)
        emit(events)

    def _end(self, number: int, event: Finished) -> None:
        """What a tenant got here counts as service on other replicas where it has requests, as it does live."""
        tenant, others = self._quotas.others_of(event.request_id, number)
        served = ServedElsewhere(tenant, event.prompt_tokens - event.cached_tokens, event.output_tokens)
        for other in () if event.fault else others:
            self.worlds[other].post(event.at, served)
        self._quotas.end(event.request_id)
