"""An engine runs in a process of its own: the process's main function, and the supervisor's handle to it."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import zmq

from rota.core.config import EngineConfig
from rota.core.events import Event
from rota.extensions import needed
from rota.policy.prefill_delayer import Alone, Exchange
from rota.policy.step_times import StepTimes
from rota.runtime.children import freeze_heap, start_child
from rota.runtime.heartbeat import Heartbeat
from rota.runtime.lifeline import die_with
from rota.runtime.live import LiveWorld
from rota.runtime.loop import run
from rota.runtime.service import BuildDevice, explain, is_own
from rota.runtime.spares import Spares
from rota.runtime.spool import Arrivals
from rota.runtime.timeouts import KILL_S, LINGER_S, EngineTimeouts
from rota.runtime.watch import Death, OnEvents, OnReady, OnWaiting, Watch
from rota.runtime.wire import Failed, Outbox, Ready, Record, SocketInbox, encode, open_socket
from rota.scheduler import Scheduler
from rota.start import START

# ── line ────────────────────────────────────────────────────────────────────────────────────────────────────────────
# A line is the pair of sockets between an engine's process and its server, as the engine holds it.

# Two processes on one machine connect in milliseconds; a wait for that must still end.
_MEET_S = 10.0


class Line(Protocol):
    """An open line: messages come in at the inbox, and records leave by the outlet."""

    @property
    def inbox(self) -> zmq.Socket[bytes]: ...

    @property
    def outlet(self) -> zmq.Socket[bytes]: ...

    def close(self) -> None: ...


class Endpoints(Protocol):
    """Where the two processes meet. It travels to the engine's process, which opens its line there."""

    def open(self, context: zmq.Context[zmq.Socket[bytes]]) -> Line: ...

    def remove(self) -> None:
        """Leave nothing behind on a disk."""
        ...


@dataclass(frozen=True, slots=True)
class LocalLine:
    inbox: zmq.Socket[bytes]
    outlet: zmq.Socket[bytes]

    def close(self) -> None:
        self.outlet.close()
        self.inbox.close()


@dataclass(frozen=True, slots=True)
class LocalEndpoints:
    """The addresses of the two sockets between processes of one machine, in a folder of their own."""

    folder: str

    @property
    def messages(self) -> str:
        return f"ipc://{self.folder}/messages"

    @property
    def events(self) -> str:
        return f"ipc://{self.folder}/events"

    def open(self, context: zmq.Context[zmq.Socket[bytes]]) -> Line:
        line = LocalLine(open_socket(context, zmq.PULL), open_socket(context, zmq.PUSH, LINGER_S))
        with _handshake(line.inbox) as inbox_monitor, _handshake(line.outlet) as outlet_monitor:
            line.inbox.bind(self.messages)
            line.outlet.connect(self.events)
            if all(monitor.poll(int(_MEET_S * 1000.0)) for monitor in (inbox_monitor, outlet_monitor)):
                self.remove()  # connected sockets need no path, and now no death can leave one behind
        return line

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def _handshake(socket: zmq.Socket[bytes]) -> Iterator[zmq.Socket[bytes]]:
    """A monitor that becomes readable once the socket is connected to its peer."""
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    yield monitor
    socket.disable_monitor()
    monitor.close()


# How often the sender tries to connect while the engine's process is starting.
_RECONNECT_MS = 10
# The socket's own thread sends last words within microseconds; a busy machine may let it wait.
_LAST_WORDS_S = 0.3
# How long a thread that reads an adapter may keep Python's lock while the loop waits for it. The default is 5 ms: as
# long as a step.
SWITCH_S = 0.001


def engine_main(build_device: BuildDevice, config: EngineConfig, endpoints: Endpoints) -> None:
    """Build the device, report, serve until `Stop`; after a failure, say why and exit with 1."""
    _die_with_parent(endpoints)
    sys.setswitchinterval(SWITCH_S)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    line = endpoints.open(context)
    outbox = Outbox(line.outlet)
    START.tell_progress, START.end_with = outbox.tell_progress, partial(_end_with, outbox)
    exit_code = 0
    try:
        _serve(build_device, config, line.inbox, outbox)
    except Exception as error:  # the process border: the supervisor tells all waiting clients why
        outbox.send([Failed(explain(error), is_own(error))])
        exit_code = 1
    line.close()
    context.term()
    # A normal exit would wait for every thread that still reads an adapter, and delay all requests.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _serve(build_device: BuildDevice, config: EngineConfig, inbox: zmq.Socket[bytes], outbox: Outbox) -> None:
    arrivals = Arrivals()
    messages = SocketInbox(inbox, arrivals)
    START.wait_for_first = partial(messages.wait_for_first, outbox.tell_progress)
    device = build_device()
    exchange, caller = _exchange(config)
    scheduler = Scheduler.from_config(config, device.capacity, exchange)
    freeze_heap()
    outbox.send([Ready(device.capacity, device.stages, START.autotuned)])
    if caller:
        messages.wake_with(caller.fileno())
    world = LiveWorld(device, messages, Heartbeat(outbox.tell_alive, StepTimes.of(device.capacity)), caller)

    def emit(events: list[Event]) -> None:
        outbox.send(events)
        arrivals.observe(events)

    run(scheduler, world, emit, config.scheduler.overlap_depth)
    arrivals.close()
    device.dismiss()


def _exchange(config: EngineConfig) -> tuple[Exchange, Any]:
    """How replicas share the delayer's reports, and who may want a pass of an idle loop for that."""
    if not config.exchange_at:
        return Alone(), None
    opened: tuple[Exchange, Any] = needed("replicas", "the prefill delayer of several replicas").open_exchange(config)
    return opened


def _end_with(outbox: Outbox, reason: str) -> None:
    """From any thread: the loop's own thread may be stuck inside the device."""
    outbox.send([Failed(reason, is_own=False)])  # another rank is lost
    time.sleep(_LAST_WORDS_S)
    os._exit(1)


def _die_with_parent(endpoints: Endpoints) -> None:
    """An engine without its server would hold the GPU's memory for nothing.

    Linux kills the engine when its server ends. On other systems a thread watches the server and ends the engine, as
    soon as the engine lets a Python thread run.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "engine_main runs in a child process"
    assert parent.pid is not None, "the parent runs"
    die_with(parent.pid)

    def watch() -> None:
        parent.join()
        endpoints.remove()
        os._exit(1)

    threading.Thread(target=watch, name="rota-parent-watch", daemon=True).start()


class EngineProcess:
    """The supervisor's side: messages sent before the process runs wait in the socket."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        build_device: BuildDevice,
        config: EngineConfig,
        spares: Spares | None = None,
    ) -> None:
        """With `spares` a spare process becomes the engine, if one waits; blocks until it has answered."""
        # ipc paths may have some hundred characters; the folder's permissions protect them.
        self._endpoints = endpoints = LocalEndpoints(tempfile.mkdtemp(prefix="rota-"))
        self._outbox = open_socket(context, zmq.PUSH)
        self._outbox.reconnect_ivl = _RECONNECT_MS
        self._inbox = open_socket(context, zmq.PULL)
        try:
            # The sender connects: from then on a pipe queues messages, also before the engine binds.
            self._outbox.connect(endpoints.messages)
            self._inbox.bind(endpoints.events)
        except zmq.ZMQError:
            # A disk without room for a socket: it has room for the folder, which must not stay.
            endpoints.remove()
            raise
        self._orders = build_device, config, endpoints
        self._process: BaseProcess = multiprocessing.get_context("spawn").Process(
            target=engine_main, args=self._orders, name="rota-engine", daemon=True
        )
        self._spares = spares
        self._spare = spares.take(self) if spares else None

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def start(self) -> None:
        """The calling thread must live as long as the process may: Linux kills the process when that thread ends."""
        if self._spare and self._spare.begin(engine_main, *self._orders):
            self._process = self._spare.process
        else:
            start_child(self._process)

    def send(self, record: Record) -> None:
        """Queue a record; does not block. One thread at a time."""
        self._outbox.send(encode([record]))

    def watch(self, on_ready: OnReady, on_events: OnEvents, timeouts: EngineTimeouts, _on_waiting: OnWaiting) -> Death:
        """Pass on the process's records until it is dead; kill it once it has said nothing for too long."""

        def note_ready(ready: Ready) -> None:
            on_ready(ready)
            if self._spares:
                self._spares.note_ready(self, ready.capacity)

        return Watch(self._process, self._inbox, note_ready, on_events, timeouts).until_death()

    def kill(self) -> None:
        if self._process.pid is not None:
            self._process.kill()

    def close(self) -> None:
        """Release all resources; a process that still runs is killed."""
        if self._process.pid is not None:
            self._process.kill()
            self._process.join(KILL_S)  # a process inside a broken driver may never end
        if self._spare:
            self._spare.end()  # it may never have begun
        if self._spares:
            self._spares.note_end(self)
        self._outbox.close()
        self._inbox.close()
        self._endpoints.remove()
