"""What an engine's start hears and tells: its first adapters, what was tried out, progress, last words and its age."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rota.core.config import FirstAdapters
from rota.core.stages import AutotuneResult

# ── first ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# What the adapters to start with need reaches an engine while it is built, before it chooses its slots.
#
# The server looks at thousands of folders while the engine's process imports, so that no start waits for that look.


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


WaitForFirst = Callable[[], FirstAdapters]

_waiters: list[WaitForFirst] = []


def listen_for_first(wait: WaitForFirst) -> None:
    """A process builds one device, so there is one way to wait for the whole process."""
    _waiters[:] = [wait]


def wait_for_first() -> FirstAdapters:
    """Blocks until the server has told. Without a server that tells there are none: a follower asks rank 0."""
    return _waiters[0]() if _waiters else FirstAdapters()


# ── autotune results ────────────────────────────────────────────────────────────────────────────────────────────────
# What an engine's start has tried out goes to the supervisor, which tells the next engine before that builds.

# A process builds one device, so there is one list of each for the whole process.
_known: list[AutotuneResult] = []
_made: list[AutotuneResult] = []


def build_with(autotuned: tuple[AutotuneResult, ...], build_device: Callable[[], Any]) -> Any:
    """Build a device that need not try out what an engine before it has tried out."""
    know_autotuned(autotuned)
    return build_device()


def know_autotuned(autotuned: tuple[AutotuneResult, ...]) -> None:
    """An engine before this one has made these."""
    _known[:] = autotuned


def known_autotuned() -> tuple[AutotuneResult, ...]:
    return tuple(_known)


def tell_autotuned(autotuned: tuple[AutotuneResult, ...]) -> None:
    """The code that builds a device has made these, or known them."""
    _made[:] = autotuned


def made_autotuned() -> tuple[AutotuneResult, ...]:
    return tuple(_made)


# ── progress ────────────────────────────────────────────────────────────────────────────────────────────────────────
# Progress of a start reaches the supervisor: the code that builds a device tells, and the engine's process listens.

TellProgress = Callable[[str], None]

_listeners: list[TellProgress] = []


def listen_for_progress(listener: TellProgress) -> None:
    """A process builds one device, so there is one listener for the whole process."""
    _listeners[:] = [listener]


def tell_progress(what: str) -> None:
    """The start goes on; from any thread. Without a listener nothing happens."""
    for listener in _listeners:
        listener(what)


# ── last words ──────────────────────────────────────────────────────────────────────────────────────────────────────
# Last words reach the supervisor from any thread, also while the loop's own thread is stuck inside the device.

EndWith = Callable[[str], None]

_hearers: list[EndWith] = []


def listen_for_last_words(listener: EndWith) -> None:
    """A process has one engine, so there is one listener for the whole process; it tells the reason and ends both."""
    _hearers[:] = [listener]


def end_with(reason: str) -> None:
    """The engine cannot go on; from any thread. Without a listener nothing happens."""
    for listener in _hearers:
        listener(reason)


# ── process age ─────────────────────────────────────────────────────────────────────────────────────────────────────
# A process knows when it began: before its first line of Python ran, or when it was given its work.

# The field of /proc/PID/stat behind the name of the program, as proc(5) counts it, less three.
_STARTED = 19

_work_began_at: list[float] = []


def count_from_now() -> None:
    """What came before was no part of the process's work: it waited to be needed."""
    _work_began_at[:] = [time.monotonic()]


def process_began_at() -> float:
    """When this process began, on the monotonic clock; now, on a system that does not tell."""
    if _work_began_at:
        return _work_began_at[0]
    now = time.monotonic()
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[_STARTED]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):  # not Linux
        return now
    return now - max(0.0, age_s)
