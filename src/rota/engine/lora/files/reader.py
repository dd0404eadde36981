"""The reader brings adapters from disk to host memory, one by one, and gives up on a disk that does not answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue

from rota.core.adapter import Adapter
from rota.core.errors import AdapterError
from rota.engine.lora.host import HostAdapter

# A rank-64 adapter of an 8B model is 340 MB; a network disk that takes longer than this will not be waited for.
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Refused:
    """What lies where an adapter could not be read: its reason alone, for an exception would keep the weights alive."""

    reason: str


Copy = HostAdapter | Refused


@dataclass(slots=True)
class _Job:
    adapter: Adapter
    copy: Future[Copy] = field(default_factory=Future)


class AdapterReader:
    """One thread that reads; another takes its place should it hang, so that only one adapter is lost and not all."""

    def __init__(
        self,
        read: Callable[[Adapter], HostAdapter],
        prepare: Callable[[], None] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`prepare` is called once in every thread that reads."""
        self._read = read
        self._prepare = prepare
        self._patience_s = patience_s
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._is_closing = False
        # Guards who ends a job: the thread that reads it, or the clock.
        self._ending = threading.Lock()
        self._thread = self._start_thread()

    def submit(self, adapter: Adapter) -> Future[Copy]:
        """Read it when its turn comes; does not wait."""
        job = _Job(adapter)
        self._jobs.put(job)
        return job.copy

    def close(self) -> None:
        """Finish the read under way, refuse those that have not begun, and end the thread."""
        self._is_closing = True
        self._jobs.put(None)
        self._thread.join()

    def _start_thread(self) -> threading.Thread:
        # A daemon: a process that ends must not wait for a disk.
        thread = threading.Thread(target=self._work, name="adapter-reader", daemon=True)
        thread.start()
        return thread

    def _work(self) -> None:
        if self._prepare:
            self._prepare()
        while job := self._jobs.get():
            clock = threading.Timer(self._patience_s, self._give_up, [job])
            clock.daemon = True
            clock.start()
            is_mine = self._end(job, self._fetch(job.adapter))
            clock.cancel()
            if not is_mine:
                return  # another reads in this one's place

    def _fetch(self, adapter: Adapter) -> Copy:
        if self._is_closing:
            return Refused(f"Adapter '{adapter.name}' was not read: the engine is stopping.")
        try:
            return self._read(adapter)
        except Exception as error:  # this thread reads for others: the requests that wait hear the reason
            return Refused(reason_for(adapter, error))

    def _give_up(self, job: _Job) -> None:
        name, path = job.adapter.name, job.adapter.path
        reason = f"Adapter '{name}' could not be read from {path} within {self._patience_s:g} seconds."
        if self._end(job, Refused(reason)):
            self._thread = self._start_thread()

    def _end(self, job: _Job, copy: Copy) -> bool:
        """Give a job its result; false if it has one."""
        with self._ending:
            if job.copy.done():
                return False
            job.copy.set_result(copy)
            return True


def reason_for(adapter: Adapter, error: Exception) -> str:
    """Why an adapter could not be read or loaded, in a sentence."""
    if isinstance(error, AdapterError):
        return str(error)
    return f"Adapter '{adapter.name}' could not be loaded from {adapter.path} ({type(error).__name__}: {error})."
