"""A service whose engine makes one pass when it is told to, so that a test says what happens between two tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

from rota.core.capacity import Capacity
from rota.core.config import EngineConfig
from rota.core.events import EngineRestarted, Event
from rota.core.ids import AdapterId
from rota.core.messages import AdapterFailed, AdapterFetched, AdapterReady, AddAdapter, Message
from rota.core.plan import StepPlan, StepResult
from rota.runtime.live import LiveWorld
from rota.runtime.loop import run
from rota.runtime.promises import Promises
from rota.runtime.service import Deliver, ServicePhase, ServiceState, StateBoard, refuse
from rota.runtime.world import Device
from rota.scheduler import Scheduler
from tests.scheduler.balance import check_balance
from tests.waiting import TIMEOUT_S
from tests.watchful import WatchfulDevice

REPORTS = (AdapterFetched, AdapterReady, AdapterFailed)


REASON = "The engine was killed."


class Killed(Exception):
    """The storm ends an engine."""


class Next(Enum):
    """When the next engine takes the place of one that died."""

    AT_ONCE = auto()
    LATER = auto()
    NEVER = auto()


class SteppedInbox:
    """Lets the loop's thread run from one `take` to the next, once for each `step`."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._reports: list[Message] = []  # of the device: adapters that were read or copied
        self._changed = threading.Condition()
        self._go, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        self._is_closed = False
        self.reported = 0
        self.is_broken = False  # the engine dies before it has its next messages

    def post(self, message: Message) -> None:
        with self._changed:
            is_report = isinstance(message, REPORTS)
            (self._reports if is_report else self._messages).append(message)
            self.reported += is_report
            self._changed.notify_all()

    def take(self, wait_s: float) -> list[Message] | None:
        self._stands.release()
        self._go.acquire()
        if self.is_broken:
            raise Killed
        with self._changed:
            messages, self._messages = self._messages, []
        return None if self._is_closed and not messages else messages

    @property
    def is_empty(self) -> bool:
        return not (self._messages or self._reports)

    def hand_over(self) -> None:
        """The loop hears with its next pass what the device has reported."""
        with self._changed:
            self._messages += sorted(self._reports, key=lambda one: (one.adapter_id, type(one).__name__))  # type: ignore[union-attr]
            self._reports = []

    def wait_for_reports(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.reported >= count, TIMEOUT_S), "a read or a copy has no end"

    def step(self) -> None:
        self._go.release()
        self.stand()

    def stand(self) -> None:
        """Wait until the loop asks for messages, or has ended."""
        assert self._stands.acquire(timeout=TIMEOUT_S), "a pass of the loop does not end"

    def end(self) -> None:
        """The loop has ended, and asks no more."""
        self._stands.release()

    def close(self) -> None:
        self._is_closed = True
        self._go.release()
        self._go.release()  # the first pass after it aborts what is open, the second finds nothing


class WatchedDevice(Device[Any]):
    """A real engine, and beside it a device of integers that sees whose KV each row reads."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._capacity: Capacity = engine.capacity
        self.watch = WatchfulDevice(engine.capacity)
        self.ordered = 0  # reads and copies, each of which ends in one report
        self.dies_at = ""  # "submit", "collect", or "receive", which the inbox sees to

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    def listen(self, post: Callable[[Message], None]) -> None:
        self._engine.listen(post)

    def submit(self, plan: StepPlan) -> Any:
        if self.dies_at == "submit":
            raise Killed
        seen = self.watch.submit(plan)
        self.watch.plans.clear()
        self.ordered += len(plan.reads) + len(plan.loads)
        return self._engine.submit(plan), seen

    def collect(self, ticket: Any) -> StepResult:
        if self.dies_at == "collect":
            raise Killed
        real, seen = ticket
        self.watch.collect(seen)
        result: StepResult = self._engine.collect(real)
        return result

    def close(self) -> None:
        self._engine.close()


class SteppedService:
    """An engine in a thread that waits between two passes. One that is killed is followed by another, as under a
    supervisor: at once, or when it is told to."""

    def __init__(
        self,
        build: Callable[[], Any],
        config: EngineConfig,
        on_add: Callable[[AddAdapter], None],
        events: list[Event] | None = None,
    ) -> None:
        self._build, self._config, self._on_add = build, config, on_add
        self._board, self._promises = StateBoard(), Promises(config.engine_id)
        self._inbox = SteppedInbox()
        self._failure: Exception | None = None
        self.device: WatchedDevice | None = None  # None: it is starting, or down
        self.events: list[Event] = [] if events is None else events
        self.holds_reports = False
        self.next_engine = Next.AT_ONCE
        self.mixed: set[str] = set()  # requests that read KV of another version than their own

    @property
    def state(self) -> ServiceState:
        return self._board.state

    def wait_until_ready(self, timeout_s: float | None = None) -> Any:
        return self._board.wait_until_ready(timeout_s)

    def start(self, deliver: Deliver) -> None:
        self._deliver = deliver
        if self.next_engine is Next.AT_ONCE:
            self.come()

    def send(self, message: Message) -> None:
        if self.state.phase is ServicePhase.DOWN:
            raise refuse(self.state.reason)
        if isinstance(message, AddAdapter):
            self._on_add(message)
        self._promises.note_message(message)
        self._inbox.post(message)

    def step(self) -> None:
        """One pass of the loop, and all reads and copies that it has ordered."""
        if self.device is None:
            return
        if not self.holds_reports:
            self._inbox.hand_over()
        self._inbox.step()
        if self._failure is not None:
            self._end()
        if self.device is not None:
            self._inbox.wait_for_reports(self.device.ordered)

    def kill(self, at: str, next_engine: Next = Next.AT_ONCE) -> None:
        """The engine fails with its next pass, or with its next step."""
        if self.device is not None:
            self.device.dies_at, self.next_engine = at, next_engine
            self._inbox.is_broken = at == "receive"

    def come(self) -> None:
        """An engine serves from now on, and finds the messages that came before it."""
        self.device, self._failure = WatchedDevice(self._build()), None
        self.scheduler = Scheduler.from_config(self._config, self.device.capacity)
        world = LiveWorld(self.device, self._inbox)
        self._thread = threading.Thread(target=self._serve, args=(world, self._inbox), daemon=True)
        self._board.set(ServiceState(phase=ServicePhase.READY, capacity=self.device.capacity))
        self._thread.start()
        self._inbox.stand()

    def calm(self) -> None:
        """Nothing is held up any more, and the next engine comes at once if there is to be one."""
        self.holds_reports = False
        if self.next_engine is Next.LATER:
            self.next_engine = Next.AT_ONCE
        if self.state.phase is ServicePhase.STARTING:
            self.come()

    @property
    def is_idle(self) -> bool:
        return self.device is None or (self.scheduler.is_idle and self._inbox.is_empty)

    @property
    def is_running(self) -> bool:
        """Is an answer being given?"""
        return self.device is not None and any(group.running for group in self.scheduler._state.groups.values())

    @property
    def users(self) -> dict[AdapterId, int]:
        """The open requests of each version that the scheduler knows."""
        if self.device is None:
            return {}
        return {adapter_id: group.users for adapter_id, group in self.scheduler._state.groups.items()}

    @property
    def owes(self) -> list[Any]:
        """What it has promised and not yet done, and the adapters of the next engine, if there is to be one."""
        mine = self._promises
        known = [] if self.state.phase is ServicePhase.DOWN else mine._known
        return [*mine._requests, *mine._coming, *mine._leaving, *known]

    def stop(self) -> None:
        if self.device is not None:
            self._inbox.close()
            self._join()

    def _join(self) -> None:
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "the loop does not end"
        assert self.device is not None
        self.mixed |= self.device.watch.mixed
        self.device.close()
        self.device = None

    def _serve(self, world: LiveWorld[Any], inbox: SteppedInbox) -> None:
        try:
            run(self.scheduler, world, self._emit, self._config.scheduler.overlap_depth)
        except Exception as error:
            self._failure = error
        inbox.end()

    def _emit(self, events: list[Event]) -> None:
        check_balance(self.scheduler)
        self._promises.note_events(events)
        self.events += events
        self._deliver(events)

    def _end(self) -> None:
        """The engine is dead: as a supervisor does, end what was open, and keep messages for the next engine."""
        if not isinstance(self._failure, Killed):
            raise AssertionError("the engine failed by itself") from self._failure
        self._join()
        self._inbox = SteppedInbox()
        is_last = self.next_engine is Next.NEVER
        self._board.set(
            ServiceState(
                phase=ServicePhase.DOWN if is_last else ServicePhase.STARTING, reason=REASON if is_last else ""
            )
        )
        for message in self._promises.introductions():
            self._inbox.post(message)
        restarted = EngineRestarted(at=time.monotonic(), reason=REASON, engine_id=self._config.engine_id)
        died = [] if is_last else [restarted]
        self._deliver([*died, *self._promises.break_all(REASON)])
        if self.next_engine is Next.AT_ONCE:
            self.come()
