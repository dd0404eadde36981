"""A remote engine: the process that another machine runs when it is invited, and the supervisor's handle to it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from multiprocessing.connection import Connection, wait

import zmq

from rota.core.config import EngineConfig
from rota.core.errors import EngineDiedError
from rota.runtime.children import start_child
from rota.runtime.cluster.cluster import ClusterPlace
from rota.runtime.cluster.line import GuardedLine
from rota.runtime.cluster.records import Invitation, Joined
from rota.runtime.process import engine_main
from rota.runtime.service import BuildDevice
from rota.runtime.spool import adds_upload, pieces_before
from rota.runtime.timeouts import KILL_S, LINGER_S, EngineTimeouts
from rota.runtime.watch import Death, OnEvents, OnReady, OnWaiting, Watch
from rota.runtime.wire import Record, encode

# ── serve ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# What another machine runs for a front that invites it: today's engine process, with a guarded line to the front.

# The exit code of an engine whose front is gone, or cannot be reached any more. It must not hold a GPU.
LINE_LOST = 75
# The answer to an invitation takes the way that the invitation took.
_FRONT_S = 60.0


def run_invited(
    build_device: BuildDevice, config: EngineConfig, invitation: Invitation, host: str
) -> Iterator[Joined | int]:
    """Run an engine until its end: gives how it joined, once it listens at `host`, and its exit code at the end.

    The engine dies with the thread that asks for these, and with its process.
    """
    answers, teller = multiprocessing.Pipe(duplex=False)
    endpoints = InvitedEndpoints(invitation, host, teller)
    process = multiprocessing.get_context("spawn").Process(
        target=engine_main, args=(build_device, config, endpoints), name="rota-engine", daemon=True
    )
    try:
        start_child(process)
        teller.close()  # so that an engine that dies before its answer closes the pipe
        with answers, suppress(EOFError):
            yield answers.recv()
        process.join()
    finally:
        if process.pid is not None:
            process.kill()
            process.join(KILL_S)
    # A process inside a broken driver may outlive even this, for a while.
    yield -signal.SIGKILL if process.exitcode is None else process.exitcode


@dataclass(frozen=True, slots=True)
class InvitedEndpoints:
    """The engine's process makes its own keys, and tells the process that started it the public one."""

    invitation: Invitation
    host: str
    teller: Connection

    def open(self, context: zmq.Context[zmq.Socket[bytes]]) -> GuardedLine:
        line = GuardedLine(context, partial(os._exit, LINE_LOST), LINGER_S)
        address = line.listen(self.host)
        line.expect(self.invitation.front_key)
        self.teller.send(Joined(messages=address, engine_key=line.public_key, node=self.host, pid=os.getpid()))
        self.teller.close()
        # The front lets this engine in before it connects itself.
        if not line.guest_is_in.wait(_FRONT_S):
            raise EngineDiedError(f"The front did not connect within {_FRONT_S:g} seconds.")
        line.connect(self.invitation.events, self.invitation.front_key)
        # A socket that is closed during its handshake may drop its last words.
        if not line.is_connected.wait(_FRONT_S):
            raise EngineDiedError(f"The front at {self.invitation.events} could not be reached.")
        return line

    def remove(self) -> None:
        """There is nothing on a disk."""


# ── engine ──────────────────────────────────────────────────────────────────────────────────────────────────────────

# The news of an end and the last records come by different ways, and the news may be faster.
_LATE_S = 0.5


class RemoteEngine:
    """Listens from its start on at a port of this machine; messages wait until the engine has joined."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], elsewhere: ClusterPlace, host: str) -> None:
        """`host` is the numeric address of this machine that the other machine can reach."""
        self._context, self._elsewhere, self._host = context, elsewhere, host
        # One thread sends, and another tells that the engine has joined.
        self._lock = threading.Lock()
        self._line: GuardedLine | None = None
        self._joined: Joined | None = None
        # Records that wait until the engine has joined, or behind an upload whose files are being read.
        self._waiting: deque[Record] = deque()
        self._is_ordered, self._was_lost = False, False

    @property
    def pid(self) -> int | None:
        """None until it has joined, and on another machine: here the number would mean some other process."""
        return self._joined.pid if self._joined and self._joined.node == self._host else None

    def start(self) -> None:
        with self._lock:
            self._line = line = GuardedLine(self._context, self._on_lost)
            invitation = Invitation(line.listen(self._host), line.public_key)
        self._is_ordered = True
        self._elsewhere.start(invitation, self._on_joined)

    def send(self, record: Record) -> None:
        with self._lock:
            if self._joined is not None and not self._waiting and not adds_upload(record):
                self._post(record)
                return
            self._waiting.append(record)
            if self._joined is not None and len(self._waiting) == 1:
                self._start_sending()

    def watch(
        self, on_ready: OnReady, on_events: OnEvents, timeouts: EngineTimeouts, on_waiting: OnWaiting, /
    ) -> Death:
        """Pass on the engine's records until it is dead; kill it once it has said nothing for too long."""
        assert self._line is not None, "it was started"
        watch = Watch(
            self._elsewhere,
            self._line.inbox,
            on_ready,
            on_events,
            timeouts,
            waiting=lambda: self._elsewhere.waiting,
            on_waiting=on_waiting,
            late_s=_LATE_S,
        )
        death = watch.until_death()
        death = replace(death, ending=self._elsewhere.ending or self._loss(death))
        # A machine that refuses will do so again, like an engine that says why. Of other ends nobody knows.
        return replace(death, last_words=death.last_words or death.ending) if self._elsewhere.is_refused else death

    def kill(self) -> None:
        if self._is_ordered:
            self._elsewhere.kill()

    def close(self) -> None:
        """Release all resources; an engine that still runs is killed."""
        if self._is_ordered:
            self._elsewhere.kill()
            self._elsewhere.join(KILL_S)
        with self._lock:
            line, self._line = self._line, None
        if line is not None:
            line.close()
        self._elsewhere.close()

    def _on_joined(self, joined: Joined) -> None:
        with self._lock:
            if self._line is None:
                return  # it comes too late
            self._line.expect(joined.engine_key)
            self._line.connect(joined.messages, joined.engine_key)
            self._joined = joined
            if self._waiting:
                self._start_sending()

    def _start_sending(self) -> None:
        """In a thread: the files of an upload are read from the disk, and senders must not wait."""
        threading.Thread(target=self._send_waiting, name="rota-uploads", daemon=True).start()

    def _send_waiting(self) -> None:
        """Ends with the last record that waits; until then all others wait behind it."""
        while True:
            for one in chain(pieces_before(self._waiting[0]), (self._waiting[0],)):
                with self._lock:
                    self._post(one)
            with self._lock:
                self._waiting.popleft()
                if not self._waiting:
                    return

    def _post(self, record: Record) -> None:
        if self._line is None:
            return  # it is closed
        with suppress(zmq.Again):  # no line is left; the watch will see that the engine is dead
            self._line.outlet.send(encode([record]), zmq.DONTWAIT)

    def _on_lost(self) -> None:
        """A line breaks when its engine ends. If it does not end, something between the machines is broken."""
        if not wait([self._elsewhere.sentinel], LINGER_S):
            self._was_lost = True
            self._elsewhere.kill()

    def _loss(self, death: Death) -> str:
        if not (self._was_lost or death.exit_code == LINE_LOST):
            return ""
        return f"The connection to the engine on {self._joined.node if self._joined else 'another machine'} broke."
