"""The supervisor restarts an engine process that dies, and keeps its promises."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import zmq

from rota.core.adapter import Adapter
from rota.core.config import EngineConfig, FirstAdapters
from rota.core.errors import Fault
from rota.core.events import EngineRestarted
from rota.core.messages import AddAdapter, Message
from rota.core.stages import AutotuneResult, stage_fields
from rota.runtime.blame import Blame
from rota.runtime.process import EngineProcess
from rota.runtime.service import BuildDevice, Deliver, EngineService, ServicePhase, ServiceState, explain
from rota.runtime.timeouts import EngineTimeouts
from rota.runtime.watch import Death, OnEvents, OnReady, OnWaiting
from rota.runtime.wire import First, Ready, Record, Stop
from rota.start import START

LOG = logging.getLogger("rota.engine")

# How often a wait for what the first adapters need looks whether the service is to stop.
LOOK_S = 0.2
# So many times as many quick deaths are borne if each names an adapter: a broken device would name one after the other.
NAMED_DEATHS = 4


class SupervisedEngine(Protocol):
    """One engine in a process of its own, here or on another machine, from its start to its death."""

    @property
    def pid(self) -> int | None: ...

    def start(self) -> None: ...

    def send(self, record: Record) -> None:
        """Queue a record, also before the process runs; does not block. One thread at a time."""
        ...

    def watch(
        self, on_ready: OnReady, on_events: OnEvents, timeouts: EngineTimeouts, on_waiting: OnWaiting, /
    ) -> Death:
        """Pass on the process's records until it is dead.

        `on_waiting` is told why the process has no place to run, whenever that changes, and "" once it has one.
        """
        ...

    def kill(self) -> None: ...

    def close(self) -> None: ...


class AdapterLook:
    """A look at the adapters to start with, which blocks: made once, in a thread, when it is first asked for."""

    def __init__(self, look: Callable[[], FirstAdapters]) -> None:
        self._look = look
        self._lock = threading.Lock()
        self._found: Future[FirstAdapters] | None = None

    def begin(self) -> Future[FirstAdapters]:
        """For any thread; the same for all. Called once the engine's process runs: its imports take longer."""
        with self._lock:
            if self._found is None:
                pool = ThreadPoolExecutor(1, "rota-first")
                self._found = pool.submit(self._look)
                pool.shutdown(wait=False)
            return self._found


NewEngine = Callable[[zmq.Context[zmq.Socket[bytes]], BuildDevice, EngineConfig], SupervisedEngine]


class SupervisedService(EngineService):
    """The engine in its own process, started again whenever it dies or hangs.

    Requests that come during a start wait for it: a restart takes seconds, and to wait is easier for a client than to
    send again. If the engine dies once more, they end like all open requests. Adapters outlive the engine: each new
    engine reads them again, before its first request.
    """

    def __init__(
        self,
        build_device: BuildDevice,
        config: EngineConfig,
        timeouts: EngineTimeouts | None = None,
        new_engine: NewEngine = EngineProcess,
        first: AdapterLook | None = None,
        blame: Blame | None = None,
    ) -> None:
        """With `first`, each engine is told what the adapters to start with need, once that is known.

        Engines that may be given the same adapters share their `blame`.
        """
        super().__init__(config)
        self._first = first
        self._blame = blame or Blame()
        self._make_engine = new_engine
        self._build_device = build_device
        self._timeouts = timeouts or EngineTimeouts()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._stopping = threading.Event()
        self._autotuned: tuple[AutotuneResult, ...] = ()  # what the last engine has tried out

    @property
    def engine_pid(self) -> int | None:
        return self._engine.pid

    def start(self, deliver: Deliver) -> None:
        super().start(deliver)
        self._engine = self._new_engine()
        self._thread = threading.Thread(target=self._serve, name="rota-supervisor", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        with self._lock:
            self._refuse_when_down()
            if isinstance(message, AddAdapter):
                message = self._blame.judged(message)
            self._promises.note_message(message)
            self._engine.send(message)

    def stop(self) -> None:
        self._stopping.set()
        with self._lock:
            if self.state.phase is ServicePhase.READY:
                self._engine.send(Stop())
            elif self.state.phase is ServicePhase.STARTING:
                self._engine.kill()  # it reads no message before it is ready
        self._thread.join(self._timeouts.stop_s)
        self._engine.kill()
        self._thread.join()

    def _serve(self) -> None:
        try:
            self._supervise()
        except Exception as error:  # the border of a thread: clients must hear of any failure, such as no memory
            self._give_up(explain(error))

    def _supervise(self) -> None:
        quick_deaths = named_deaths = 0
        while self._start_engine():
            self._tell_first()
            death = self._engine.watch(self._on_ready, self._on_events, self._timeouts, self._on_waiting)
            if self._stopping.is_set():
                break
            culprit = self._culprit(death)
            # An engine that hangs at its first step will do so the next time: it counts as a quick death.
            is_quick = death.served_s < self._timeouts.quick_death_s or death.hung_at_once
            named_deaths = named_deaths + 1 if culprit and is_quick else 0
            # After a death that names an adapter the next engine reads that one last, or not at all.
            if culprit is None or named_deaths > NAMED_DEATHS * self._timeouts.quick_deaths:
                quick_deaths = quick_deaths + 1 if is_quick else 0
            if is_quick:
                self._autotuned = ()  # should one of its choices be at fault, the next engine tries for itself
            if death.last_words and not self.state.has_served:
                # The model or the flags are wrong, and would be so the next time.
                return self._go_down(death.reason)
            if quick_deaths >= self._timeouts.quick_deaths:
                return self._give_up(
                    f"The engine died {quick_deaths} times in a row soon after its start and stays down. "
                    f"The last time: {death.reason}"
                )
            self._replace_engine(death, culprit)
            if quick_deaths:
                self._stopping.wait(self._timeouts.pause_s * 2 ** (quick_deaths - 1))
        self._go_down("The engine was stopped.")

    def _start_engine(self) -> bool:
        """False once stopping; under the lock, so that `stop` either finds the engine started or prevents the start."""
        with self._lock:
            if self._stopping.is_set():
                return False
            self._engine.start()
            self._board.set(ServiceState(phase=ServicePhase.STARTING, engine_pid=self._engine.pid))
            return True

    def _tell_first(self) -> None:
        """Blocks this thread until it is known; an engine that imports meanwhile needs no watch."""
        if self._first is None:
            return
        found = self._first.begin()
        while not wait([found], LOOK_S).done:
            if self._stopping.is_set():
                return
        with self._lock:
            self._engine.send(First(found.result()))

    def _on_ready(self, ready: Ready) -> None:
        self._autotuned, pid = ready.autotuned, self._engine.pid
        state = ServiceState(phase=ServicePhase.READY, capacity=ready.capacity, engine_pid=pid)
        if not self.state.has_served:
            return self._board.set(replace(state, start=ready.stages))
        self._board.set(replace(state, restart=ready.stages))
        fields = {"engine": self._config.engine_id, "pid": pid, **stage_fields(ready.stages)}
        LOG.warning("The engine serves again.", extra={"fields": fields})

    def _on_waiting(self, reason: str) -> None:
        with self._lock:
            was_waiting = self.state.may_last
            if self.state.phase is not ServicePhase.STARTING:
                return
            self._board.set(ServiceState(phase=ServicePhase.STARTING, reason=reason, may_last=bool(reason)))
        if reason and not was_waiting:
            fields = {"engine": self._config.engine_id, "why": reason}
            LOG.warning("The engine has no place to run.", extra={"fields": fields})
        self._deliver([])  # the state has changed

    def _replace_engine(self, death: Death, culprit: Adapter | None) -> None:
        """End the dead engine's open requests; from now on messages wait in the next engine's socket."""
        new = self._new_engine()  # without the lock: it may have to wait for a spare's answer
        with self._lock:
            self._board.set(ServiceState(phase=ServicePhase.STARTING))
            dead, self._engine = self._engine, new
            reason, died_of = death.reason, None
            if culprit:
                end = " That adapter is quarantined now." if self._blame.quarantine_of(culprit) else ""
                reason, died_of = f"{reason} It was reading the adapter '{culprit.name}'.{end}", culprit.adapter_id
            elif death.is_own and not self._promises.reading and len(served := self._promises.served) == 1:
                (died_of,) = served
            for introduction in self._promises.introductions(self._blame.judged):
                self._engine.send(introduction)
            failed = self._promises.break_all(
                f"{reason} It is being started again; this request was lost, so please send it again.", self._fault_of
            )
        now, engine_id = time.monotonic(), self._config.engine_id
        restarted = EngineRestarted(at=now, reason=reason, engine_id=engine_id, died_of=died_of)
        try:
            self._deliver([restarted, *failed])
        finally:
            dead.close()  # without the lock: a process inside a broken driver may take seconds to end

    def _culprit(self, death: Death) -> Adapter | None:
        """The adapter that the engine died of, if it died by itself and read only that one.

        What a read raises does not end an engine. So an error that does may be of a step, if there is one.
        """
        with self._lock:
            reading, served = self._promises.reading, self._promises.served
        if not death.is_own or (death.by_error and served):
            return None
        return self._blame.note_death(reading, death.reason)

    def _fault_of(self, adapter: Adapter) -> Fault | None:
        found = self._blame.quarantine_of(adapter)
        return found.fault if found else None

    def _give_up(self, reason: str) -> None:
        LOG.error("The engine stays down.", extra={"fields": {"engine": self._config.engine_id, "why": reason}})
        self._go_down(reason)

    def _go_down(self, reason: str) -> None:
        try:
            super()._go_down(reason)
        finally:  # from here on nothing is sent, so this needs no lock
            self._engine.close()
            self._context.destroy(linger=0)  # also the sockets of an engine that failed during its start

    def _new_engine(self) -> SupervisedEngine:
        build = partial(_build_knowing, self._autotuned, self._build_device) if self._autotuned else self._build_device
        return self._make_engine(self._context, build, self._config)


def _build_knowing(autotuned: tuple[AutotuneResult, ...], build_device: BuildDevice) -> Any:
    """Build a device that need not try out what an engine before it has tried out. Runs in the engine's process."""
    START.autotuned = autotuned
    return build_device()
