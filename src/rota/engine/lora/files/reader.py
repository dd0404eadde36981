"""The reader brings adapters to host memory, one by one in each of its threads, and stops waiting for what hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue

from rota.core.adapter import Adapter
from rota.core.errors import AdapterChangedError, AdapterError, DiskError, FaultCode
from rota.engine.lora.host import HostAdapter
from rota.sources.address import has_scheme, hide_root
from rota.sources.source import UnreachableError

# A rank-64 adapter of an 8B model is 340 MB; a network disk that takes longer than this has failed.
TIMEOUT_S = 120.0
# How long the end of an engine waits for reads under way.
CLOSING_S = 10.0


@dataclass(frozen=True, slots=True)
class RefusedAdapter:
    """Stands for an adapter that could not be read: the reason only, since an exception would keep the weights.

    The code says whether that may pass: a source that was away may answer the next time, and a disk that was full may
    have room. All other failures are the adapter's own.
    """

    reason: str
    code: FaultCode = FaultCode.ADAPTER_FAILED


Copy = HostAdapter | RefusedAdapter
Read = Callable[[Adapter], HostAdapter]


@dataclass(slots=True)
class _ReadJob:
    adapter: Adapter
    copy: Future[Copy] = field(default_factory=Future)
    thread: threading.Thread | None = None  # that reads it


class AdapterReader:
    """One thread that reads, or more. If one hangs, another takes its place, so that only one adapter is lost."""

    def __init__(
        self,
        read: Read,
        prepare: Callable[[], None] | None = None,
        timeout_s: float = TIMEOUT_S,
        threads: int = 1,
    ) -> None:
        """`prepare` is called once in every thread that reads."""
        self._read = read
        self._prepare = prepare
        self._timeout_s = timeout_s
        self._jobs: SimpleQueue[_ReadJob | None] = SimpleQueue()
        self._is_closing = False
        # Either the reading thread or the timer ends a job, never both.
        self._ending = threading.Lock()
        self._threads = {self._start_thread() for _ in range(threads)}

    def submit(self, adapter: Adapter) -> Future[Copy]:
        """Queue the adapter to be read; does not wait."""
        job = _ReadJob(adapter)
        self._jobs.put(job)
        return job.copy

    def close(self) -> None:
        """Finish the reads under way, refuse those that have not begun, and end the threads.

        One that hangs, or waits for a source, is not waited for long: it ends with the process.
        """
        self._is_closing = True
        for _ in self._threads:
            self._jobs.put(None)
        for thread in list(self._threads):
            thread.join(CLOSING_S)

    def _start_thread(self) -> threading.Thread:
        # A daemon: the end of the process must not wait for a disk.
        thread = threading.Thread(target=self._work, name="adapter-reader", daemon=True)
        thread.start()
        return thread

    def _work(self) -> None:
        if self._prepare:
            self._prepare()
        while job := self._jobs.get():
            clock = threading.Timer(self._timeout_s, self._give_up, [job])
            clock.daemon = True
            job.thread = threading.current_thread()
            clock.start()
            has_ended_it = self._end(job, self._fetch(job.adapter))
            clock.cancel()
            if not has_ended_it:
                return  # another thread has taken this one's place

    def _fetch(self, adapter: Adapter) -> Copy:
        if self._is_closing:
            return RefusedAdapter(f"Adapter '{adapter.name}' was not read: the engine is stopping.")
        try:
            return self._read(adapter)
        except Exception as error:  # the border of a thread: any failure is this adapter's, not the reader's
            return RefusedAdapter(reason_for(adapter, error), _code_of(adapter, error))

    def _give_up(self, job: _ReadJob) -> None:
        name, path = job.adapter.name, job.adapter.path
        reason = f"Adapter '{name}' could not be read from {path} within {self._timeout_s:g} seconds."
        if self._end(job, RefusedAdapter(reason, _code_of(job.adapter, None))):
            assert job.thread is not None, "the clock starts with the read"
            self._threads.discard(job.thread)
            self._threads.add(self._start_thread())

    def _end(self, job: _ReadJob, copy: Copy) -> bool:
        """Give a job its result; false if the job already has one."""
        with self._ending:
            if job.copy.done():
                return False
            job.copy.set_result(copy)
            return True


def checked_first(read: Read, refuse: Callable[[Adapter], None]) -> Read:
    """Adapters of sources are refused by their config and headers, if these are wrong, before they are downloaded.

    A source that breaks off, or a disk without room for headers, is left to the download: it tries again, and tells.
    """

    def read_checked(adapter: Adapter) -> HostAdapter:
        if has_scheme(adapter.path):
            with suppress(UnreachableError, OSError):
                refuse(adapter)
        return read(adapter)

    return read_checked


def _code_of(adapter: Adapter, error: Exception | None) -> FaultCode:
    """What kind of failure it is; without an error, the read was given up on while it waited."""
    if isinstance(error, DiskError | AdapterChangedError):
        return error.code
    is_away = has_scheme(adapter.path) and (error is None or isinstance(error, UnreachableError))
    return FaultCode.SOURCE_AWAY if is_away else FaultCode.ADAPTER_FAILED


def reason_for(adapter: Adapter, error: Exception) -> str:
    """Why an adapter could not be read or loaded, in a sentence. Paths in the root of a key start at that root."""
    text = hide_root(str(error), adapter.root)
    if isinstance(error, AdapterError):
        return text
    return f"Adapter '{adapter.name}' could not be loaded from {adapter.path} ({type(error).__name__}: {text})."
