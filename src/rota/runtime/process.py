"""An engine runs in a process of its own: the process's main function, and the supervisor's handle to it."""

from __future__ import annotations

import math
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker

import zmq

from rota.core.config import Capacity, EngineConfig
from rota.core.events import Event
from rota.runtime.heap import freeze_heap
from rota.runtime.lifeline import die_with
from rota.runtime.live import LiveWorld
from rota.runtime.loop import run
from rota.runtime.service import BuildDevice, Deliver, explain
from rota.runtime.wire import Failed, Ready, Record, SocketInbox, encode, open_socket, receive_all
from rota.scheduler import Scheduler

# Long enough to send the last words of a process that ends.
_LINGER_S = 2.0
# Records that a process sent before it died may still be on their way through the socket.
_LATE_S = 0.05
# Two processes on one machine connect in milliseconds; a wait for that must still end.
_MEET_S = 10.0
# How often the sender tries to connect while the engine's process is starting.
_RECONNECT_MS = 10

OnReady = Callable[[Capacity], None]
# Since when the oldest open request waits for its end; infinity if no request is open.
OwedSince = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the supervisor waits, and how often it tries again."""

    start_s: float = 900.0
    # A step takes milliseconds, on a slow CPU seconds; an engine whose device hangs says nothing more.
    silence_s: float = 600.0
    # An engine that was never ready, or served for less than this, died quickly. After `quick_deaths` in a row it
    # stays down.
    quick_death_s: float = 5.0
    quick_deaths: int = 5
    # The pause before the next start; it doubles with every quick death.
    pause_s: float = 0.25
    stop_s: float = 3.0


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The addresses of the two sockets between the processes, in a folder of their own."""

    folder: str

    @property
    def messages(self) -> str:
        return f"ipc://{self.folder}/messages"

    @property
    def events(self) -> str:
        return f"ipc://{self.folder}/events"

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """How an engine process ended: its last words if it had any, and how long it served."""

    last_words: str
    exit_code: int
    was_ready: bool
    served_s: float

    @property
    def reason(self) -> str:
        if self.last_words:
            return self.last_words
        if self.exit_code < 0:
            return f"The engine process was killed by {signal.Signals(-self.exit_code).name}."
        return f"The engine process ended with exit code {self.exit_code}."


def engine_main(build_device: BuildDevice, config: EngineConfig, endpoints: Endpoints) -> None:
    """Build the device, report, serve until `Stop`; after a failure, say why and exit with 1."""
    _die_with_parent(endpoints)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox = open_socket(context, zmq.PULL)
    outbox = open_socket(context, zmq.PUSH, _LINGER_S)
    with _handshake(inbox) as inbox_monitor, _handshake(outbox) as outbox_monitor:
        inbox.bind(endpoints.messages)
        outbox.connect(endpoints.events)
        if all(monitor.poll(int(_MEET_S * 1000.0)) for monitor in (inbox_monitor, outbox_monitor)):
            endpoints.remove()  # connected sockets need no path, and now no death can leave one behind

    def emit(events: list[Event]) -> None:
        outbox.send(encode(events))

    exit_code = 0
    try:
        device = build_device()
        scheduler = Scheduler.from_config(config, device.capacity)
        freeze_heap()
        outbox.send(encode([Ready(device.capacity)]))
        run(scheduler, LiveWorld(device, SocketInbox(inbox)), emit, config.scheduler.overlap_depth)
    except Exception as error:  # the process border: the supervisor tells all waiting clients why
        outbox.send(encode([Failed(explain(error))]))
        exit_code = 1
    outbox.close()
    inbox.close()
    context.term()
    # A normal exit would wait for every thread that still reads an adapter, and delay all requests.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


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


@contextmanager
def _handshake(socket: zmq.Socket[bytes]) -> Iterator[zmq.Socket[bytes]]:
    """A monitor that becomes readable once the socket is connected to its peer."""
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    yield monitor
    socket.disable_monitor()
    monitor.close()


class EngineProcess:
    """The supervisor's side: messages sent before the process runs wait in the socket."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], build_device: BuildDevice, config: EngineConfig
    ) -> None:
        # ipc paths may have some hundred characters; the folder's permissions protect them.
        self._endpoints = endpoints = Endpoints(tempfile.mkdtemp(prefix="rota-"))
        self._outbox = open_socket(context, zmq.PUSH)
        self._outbox.reconnect_ivl = _RECONNECT_MS
        # The sender connects: from then on a pipe queues messages, also before the engine binds.
        self._outbox.connect(endpoints.messages)
        self._inbox = open_socket(context, zmq.PULL)
        self._inbox.bind(endpoints.events)
        self._process = multiprocessing.get_context("spawn").Process(
            target=engine_main, args=(build_device, config, endpoints), name="rota-engine", daemon=True
        )

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def start(self) -> None:
        """The calling thread must live as long as the process may: Linux kills the process when that thread ends."""
        # Else the tracker would start with the first process, and it unblocks SIGINT in any case.
        resource_tracker.ensure_running()
        # The process inherits the mask: Ctrl-C and SIGHUP reach the whole group, but only the parent acts on them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def send(self, record: Record) -> None:
        """Queue a record; does not block. One thread at a time."""
        self._outbox.send(encode([record]))

    def watch(self, on_ready: OnReady, on_events: Deliver, owed_since: OwedSince, patience: Patience) -> Death:
        """Pass on the process's records until it is dead; kill it once it has said nothing for too long.

        Too long is `start_s` until it is ready, then `silence_s` while a request is open, and a moment after its last
        words.
        """
        poller = zmq.Poller()
        poller.register(self._inbox, zmq.POLLIN)
        poller.register(self._process.sentinel, zmq.POLLIN)
        ready_at = math.inf
        last_words = ""
        silent_since, limit_s = time.monotonic(), patience.start_s
        complaint = f"The engine was not ready after {limit_s:g} seconds."
        is_dead = False
        while not is_dead:
            wait_s = silent_since + limit_s - time.monotonic()
            polled = dict(poller.poll(max(0, math.ceil(wait_s * 1000.0))))
            is_dead = self._process.sentinel in polled
            if polled:
                silent_since = time.monotonic()
            elif ready_at < math.inf and not last_words and (asked_at := owed_since()) > silent_since:
                silent_since = min(asked_at, time.monotonic())
            else:
                last_words = last_words or complaint
                self.kill()
            events: list[Event] = []
            for record in receive_all(self._inbox, _LATE_S if is_dead else 0.0):
                match record:
                    case Ready(capacity):
                        ready_at, limit_s = time.monotonic(), patience.silence_s
                        complaint = f"The engine said nothing for {limit_s:g} seconds while requests were open."
                        on_ready(capacity)
                    case Failed(reason):
                        last_words, limit_s = reason, _LINGER_S
                    case event:
                        events.append(event)
            if events:
                on_events(events)
        self._process.join()
        served_s = max(0.0, time.monotonic() - ready_at)
        return Death(
            last_words=last_words,
            exit_code=self._process.exitcode or 0,
            was_ready=ready_at < math.inf,
            served_s=served_s,
        )

    def kill(self) -> None:
        if self._process.pid is not None:
            self._process.kill()

    def close(self) -> None:
        """Release all resources; a process that still runs is killed."""
        if self._process.pid is not None:
            self._process.kill()
            self._process.join()
        self._outbox.close()
        self._inbox.close()
        self._endpoints.remove()
