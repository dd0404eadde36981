"""A remote engine is the supervisor's handle to an engine process on another machine."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from multiprocessing.connection import wait

import zmq

from rota.runtime.patience import KILL_S, LINGER_S, Patience
from rota.runtime.remote.invitation import Elsewhere, Invitation, Joined
from rota.runtime.remote.line import GuardedLine
from rota.runtime.remote.serve import LINE_LOST
from rota.runtime.uploads import adds_upload, pieces_before
from rota.runtime.watch import Death, OnEvents, OnReady, OnWaiting, Watch
from rota.runtime.wire import Record, encode

# The news of an end and the last records come by different ways, and the news may be faster.
_LATE_S = 0.5


class RemoteEngine:
    """Listens from its start on at a port of this machine; messages wait until the engine has joined."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], elsewhere: Elsewhere, host: str) -> None:
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

    def watch(self, on_ready: OnReady, on_events: OnEvents, patience: Patience, on_waiting: OnWaiting, /) -> Death:
        """Pass on the engine's records until it is dead; kill it once it has said nothing for too long."""
        assert self._line is not None, "it was started"
        watch = Watch(
            self._elsewhere,
            self._line.inbox,
            on_ready,
            on_events,
            patience,
            waiting=lambda: self._elsewhere.waiting,
            on_waiting=on_waiting,
            late_s=_LATE_S,
        )
        death = watch.until_death()
        return replace(death, ending=self._elsewhere.ending or self._loss(death))

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
