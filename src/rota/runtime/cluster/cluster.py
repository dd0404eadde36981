"""The cluster as the front knows it: what it has, which places were ordered there, and whether it is there at all."""

from __future__ import annotations

import logging
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Pipe

from rota.core.errors import ConfigError
from rota.runtime.children import deaf_children
from rota.runtime.cluster.joining import in_one_line
from rota.runtime.cluster.records import (
    Away,
    Began,
    Cancel,
    Connected,
    Ended,
    EngineJob,
    EngineOrder,
    Invitation,
    Leave,
    Listens,
    Need,
    OnJoined,
    Orders,
    Sight,
    Silent,
    Told,
    waiting,
)
from rota.runtime.lifeline import tied

# ── driver process ──────────────────────────────────────────────────────────────────────────────────────────────────
# The front's handle to its driver: a program that ends with the front, and a line to it.

# A driver that has closed its line ends in a moment.
_END_S = 5.0


class DriverProcess:
    """The thread that starts it must live as long as the driver, which Linux kills with that thread."""

    def __init__(self, address: str) -> None:
        self._line, theirs = Pipe()
        # Ray's own lines are not the server's.
        self._words = tempfile.TemporaryFile()  # noqa: SIM115, closed by `close`
        paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
        environ = os.environ | {"PYTHONPATH": paths, "RAY_USAGE_STATS_ENABLED": "0"}
        self._orders: queue.SimpleQueue[Orders | None] = queue.SimpleQueue()
        command = [sys.executable, "-m", "rota.runtime.cluster", str(theirs.fileno()), address]
        with theirs, deaf_children():
            self._process = subprocess.Popen(
                tied(command),
                env=environ,
                cwd="/",  # Ray would have the engines look for modules in the front's folder
                stdin=subprocess.DEVNULL,
                stdout=self._words,
                stderr=self._words,
                pass_fds=[theirs.fileno()],
            )
        # A driver that waits for the cluster's head reads nothing meanwhile, and no thread here may wait for that.
        self._sender = threading.Thread(target=self._send_all, name="rota-orders", daemon=True)
        self._sender.start()

    def send(self, record: Orders) -> None:
        """From any thread, without waiting. A driver that is gone is heard of by `hear`."""
        self._orders.put(record)

    def _send_all(self) -> None:
        with suppress(OSError):
            for record in iter(self._orders.get, None):
                self._line.send(record)

    def hear(self) -> Told | None:
        """Wait for what the driver tells; None once it is gone."""
        try:
            told: Told = self._line.recv()
        except (EOFError, OSError):
            return None
        return told

    def last_words(self) -> str:
        """What the driver wrote last, in one line, for a reason that names no other."""
        size = self._words.seek(0, os.SEEK_END)
        self._words.seek(max(0, size - 2000))
        lines = self._words.read().decode("utf-8", "replace").splitlines()
        return in_one_line(next((line for line in reversed(lines) if line.strip()), ""))

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """After the last word was heard."""
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._orders.put(None)
        self._sender.join()
        self._line.close()
        self._words.close()


# ── place ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# A place is where one engine runs on the cluster, from the order to its end, as a supervisor's watch looks at it.

# A place on a machine that is idle is found within seconds; longer than this it is waited for.
_SOON_S = 5.0
# As of a process that was killed.
_KILLED = -9


class ClusterPlace:
    """Its sentinel becomes readable once the engine has ended, or will never begin. The exit code is None while the
    engine runs, and also if the code is not known.

    Ended at once when it is killed, also before it has begun: the front does not wait for what Ray still does for that.
    """

    def __init__(self, cluster: Cluster, need: Need, job: EngineJob) -> None:
        self.need, self.job = need, job
        self.invitation: Invitation | None = None
        self.node = ""  # where it runs, once it does
        self.ending = ""  # why it ended, as a sentence, if that is known here: its machine is gone
        self.exitcode: int | None = None
        self.is_refused = False  # its machine will never run it as it is
        self._cluster = cluster
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
        """Why it has not begun, as a sentence; empty once it has a place, and while one will soon be found."""
        if self.node or self.is_over or time.monotonic() < self._ordered_at + _SOON_S:
            return ""
        return self._cluster.why_waiting(self.need)

    def start(self, invitation: Invitation, on_joined: OnJoined) -> None:
        """Begin, without waiting; `on_joined` is called once, from another thread, when the engine listens."""
        self.invitation, self._on_joined = invitation, on_joined
        self._ordered_at = time.monotonic()
        self._cluster.order(self)

    def kill(self) -> None:
        self.end(Ended(number=0, exit_code=_KILLED))
        self._cluster.cancel(self)

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


LOG = logging.getLogger("rota.cluster")

# Ray itself gives up on a head after a minute.
JOIN_S = 70.0
# Before the next driver, if one has ended.
_AGAIN_S = 1.0
# A driver gives back all places before it ends. One that is killed leaves that to Ray.
_LEAVE_S = 5.0


class Cluster:
    """One thread of its own starts the driver, hears it, and starts another one whenever it ends.

    An engine's place ends with its driver. An order that has not begun stays, and goes to the next driver.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.host = ""  # the front's address on the cluster's network
        self.sight = Sight()
        self._changed = threading.Condition()  # guards all below
        self._away = ""  # why it is not there
        self._driver: DriverProcess | None = None
        self._is_there, self._is_closing = False, False
        self._places: dict[int, ClusterPlace] = {}
        self._numbers = count(1)
        self._thread = threading.Thread(target=self._run, name="rota-cluster", daemon=True)

    def join(self, within_s: float = JOIN_S) -> None:
        """Join the cluster and look at it. Raises ConfigError with the reason if that fails."""
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self.sight.nodes or self._away, within_s)
            reason = self._away or f"The Ray cluster at {self.address} did not answer within {within_s:g} seconds."
        if not self.sight.nodes:
            self.close()
            raise ConfigError(reason)

    def wait_for(self, is_enough: Callable[[Sight], bool], within_s: float) -> bool:
        """Whether the cluster has enough in time; machines may come one after the other."""
        with self._changed:
            return self._changed.wait_for(lambda: is_enough(self.sight) or self._is_closing, within_s)

    def look_again(self) -> None:
        """Threads that wait for the cluster ask again."""
        with self._changed:
            self._changed.notify_all()

    @property
    def pending(self) -> int:
        """How many orders have not begun."""
        with self._changed:
            return sum(not place.node for place in self._places.values())

    def order(self, place: ClusterPlace) -> None:
        """Have a place found, now or once the cluster is there again."""
        with self._changed:
            number = next(self._numbers)
            self._places[number] = place
            if self._is_there:
                self._send(_order_of(number, place))

    def cancel(self, place: ClusterPlace) -> None:
        """End what runs at a place, or stop looking for one."""
        with self._changed:
            for number in [number for number, one in self._places.items() if one is place]:
                del self._places[number]
                self._send(Cancel(number))

    def why_waiting(self, need: Need) -> str:
        """Why there is no place."""
        return waiting(need, self.sight) if self._is_there else self._away

    def close(self) -> None:
        """End the driver, and with it everything on the cluster."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            self._send(Leave())
        self._thread.join(_LEAVE_S)
        with self._changed:
            if self._driver:
                self._driver.kill()
        self._thread.join()

    def _send(self, record: Orders) -> None:
        if self._driver:
            self._driver.send(record)

    def _run(self) -> None:
        while not self._is_closing:
            driver = self._new_driver()
            while told := driver.hear():
                self._note(told)
            self._lose(driver.last_words())
            driver.close()
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing, _AGAIN_S)

    def _new_driver(self) -> DriverProcess:
        driver = DriverProcess(self.address)
        with self._changed:
            self._driver = driver
            if self._is_closing:  # `close` has not seen this driver
                driver.send(Leave())
        return driver

    def _lose(self, words: str) -> None:
        """The driver has ended, and with it all engines."""
        with self._changed:
            self._driver = None
            if self._is_there or not self._away:
                self._miss("Ray's driver has ended.", words)
            lost = [number for number, place in self._places.items() if place.node]
            places = [self._places.pop(number) for number in lost]
        for place in places:
            place.end(Ended(number=0, why=self._away))

    def _miss(self, why: str, words: str = "") -> None:
        """`words` are Ray's own."""
        was_there, self._is_there = self._is_there, False
        self._away = f"The Ray cluster at {self.address} is gone, and is asked again. {why}" if self.host else why
        self._changed.notify_all()
        if was_there and not self._is_closing:
            fields = {"address": self.address, "why": why} | ({"ray": words} if words else {})
            LOG.error("The Ray cluster is gone.", extra={"fields": fields})

    def _note(self, told: Told) -> None:
        with self._changed:
            match told:
                case Connected(host=host):
                    self._connect(host)
                case Away(reason):
                    self._miss(reason)
                case Sight():
                    self.sight = told
                    self._changed.notify_all()
                case Silent():
                    LOG.warning("The head of the Ray cluster is silent.", extra={"fields": {"address": self.address}})
        if isinstance(told, Began | Listens | Ended):
            self._pass_on(told)

    def _pass_on(self, told: Began | Listens | Ended) -> None:
        """Without the lock: an engine that hears of its place may kill it at the same moment."""
        with self._changed:
            place = self._places.get(told.number)
            if isinstance(told, Ended):
                self._places.pop(told.number, None)
        if place:
            place.note(told)

    def _connect(self, host: str) -> None:
        if self.host:
            LOG.warning("The Ray cluster is back.", extra={"fields": {"address": self.address}})
        self.host, self._is_there, self._away = host, True, ""
        for number, place in self._places.items():
            self._send(_order_of(number, place))


def _order_of(number: int, place: ClusterPlace) -> EngineOrder:
    assert place.invitation is not None, "a place is ordered with an invitation"
    return EngineOrder(number=number, need=place.need, job=place.job, invitation=place.invitation)
