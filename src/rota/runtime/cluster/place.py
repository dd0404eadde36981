"""A place is where one engine runs on the cluster, from the order to its end, as a supervisor's watch looks at it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from rota.runtime.cluster.needs import Need
from rota.runtime.cluster.records import Began, Ended, Job, Listens
from rota.runtime.remote.invitation import Invitation, OnJoined

# A place on a machine that is idle is found within seconds; longer than this it is waited for.
_SOON_S = 5.0
# As of a process that was killed.
_KILLED = -9


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """What a place asks of the cluster."""

    order: Callable[[Place], None]
    cancel: Callable[[Place], None]
    waiting: Callable[[Need], str]  # why there is no place


class Place:
    """Ended at once when it is killed: the front does not wait for what Ray still does for that."""

    def __init__(self, desk: Desk, need: Need, job: Job) -> None:
        self.need, self.job = need, job
        self.invitation: Invitation | None = None
        self.node = ""  # where it runs, once it does
        self.ending = ""
        self.exitcode: int | None = None
        self.is_refused = False
        self._desk = desk
        self._on_joined: OnJoined | None = None
        self._ordered_at = 0.0
        self._over = threading.Event()
        self._lock = threading.Lock()
        self.sentinel, self._signal = os.pipe()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    @property
    def waiting(self) -> str:
        """Why it has not begun; empty once it has, and while that may take a moment."""
        if self.node or self.is_over or time.monotonic() < self._ordered_at + _SOON_S:
            return ""
        return self._desk.waiting(self.need)

    def start(self, invitation: Invitation, on_joined: OnJoined) -> None:
        self.invitation, self._on_joined = invitation, on_joined
        self._ordered_at = time.monotonic()
        self._desk.order(self)

    def kill(self) -> None:
        self.end(Ended(number=0, exit_code=_KILLED))
        self._desk.cancel(self)

    def join(self, timeout: float | None = None) -> None:
        self._over.wait(timeout)

    def note(self, told: Began | Listens | Ended) -> None:
        match told:
            case Began(_, node):
                self.node = node
            case Listens(_, joined) if self._on_joined and not self.is_over:
                self._on_joined(joined)
            case Ended():
                self.end(told)

    def end(self, ended: Ended) -> None:
        """The first end counts."""
        with self._lock:
            if self.is_over:
                return
            self.exitcode, self.ending, self.is_refused = ended.exit_code, ended.why, ended.is_refused
            self._over.set()
            os.write(self._signal, b".")

    def close(self) -> None:
        """No watch looks at it any more."""
        self.end(Ended(number=0))
        os.close(self._signal)
        os.close(self.sentinel)
