"""The loader brings adapters from disk to host memory, and from there into slots, while steps run.

Several threads, so that a slow disk never delays a copy, and a copy under way never delays the order of the next one:
one reads for requests, one idly and some from sources (`AdapterReader`), one queues copies, one waits for their end. An
adapter's copy in host memory is a future. A load continues when the future is done: at once if the adapter was read
earlier, else after the read.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Self

import torch

from rota.core.adapter import Adapter, changed_since
from rota.core.errors import AdapterChangedError, AdapterError
from rota.core.ids import AdapterId, Slot
from rota.core.messages import AdapterFailed, AdapterFetched, AdapterReady, Message
from rota.engine.lora.bank import Bank
from rota.engine.lora.files.brought import Brought
from rota.engine.lora.files.checkpoint import read_checkpoint
from rota.engine.lora.files.outline import Inquire, answer
from rota.engine.lora.files.reader import AdapterReader, Copy, RefusedAdapter, reason_for
from rota.engine.lora.files.workspace import PLAIN, pinning_workspace
from rota.engine.lora.host import HostAdapter
from rota.engine.model.spec import ModelSpec
from rota.engine.parallel.shard import WHOLE, Shard
from rota.sources.address import has_scheme

# ── timed copy ──────────────────────────────────────────────────────────────────────────────────────────────────────
# A timed copy is work on the copies' own stream, between two events that tell how long it took.


class TimedCopy:
    """What runs inside `with` is queued on the stream behind `is_free`. A CPU has no stream: it has copied at the end.

    `is_complete` is recorded behind the work, also if an error ended it.
    """

    def __init__(self, stream: torch.cuda.Stream | None, is_free: torch.cuda.Event | None = None) -> None:
        self.is_complete: torch.cuda.Event | None = None
        self._is_free = is_free
        self._begun_at = self._ended_at = 0.0
        if stream is not None:
            self._on_stream = torch.cuda.stream(stream)
            # Blocking: the thread that waits sleeps, instead of spinning beside the thread that launches steps.
            self._begins, self.is_complete = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))

    def __enter__(self) -> Self:
        if self.is_complete is not None:
            self._on_stream.__enter__()
            if self._is_free is not None:
                self._is_free.wait()
            self._begins.record()
        self._begun_at = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended_at = time.perf_counter()
        if self.is_complete is not None:
            self.is_complete.record()
            self._on_stream.__exit__(kind, error, trace)

    def wait(self) -> float:
        """Blocks until the work is done, and gives its seconds on the device."""
        if self.is_complete is None:
            return self._ended_at - self._begun_at
        self.is_complete.synchronize()
        return self._begins.elapsed_time(self.is_complete) / 1e3


# ── pending copy ────────────────────────────────────────────────────────────────────────────────────────────────────
# A pending copy is an adapter's copy into a slot, from its order on: a step that uses the slot waits for it.
#
#     host      order A    plan and submit the next step
#     copies               | A          |
#     device    | step     | step       | step with A |      the third step's stream waits for A's event
#
# The step waits on the device, so the host goes on at once. Before that the host makes sure that the copy is queued: a
# stream that waits for an event that was never recorded does not wait at all.


class PendingCopy:
    """One thread queues the copy, or says that it failed; another thread lets steps wait for it."""

    def __init__(self) -> None:
        self._queued: Future[torch.cuda.Event | None] = Future()
        self.has_failed = False  # does the slot hold nothing?

    def queue(self, is_complete: torch.cuda.Event | None) -> None:
        """The copy is queued, and `is_complete` is recorded behind it; without an event it is complete."""
        self._queued.set_result(is_complete)

    def fail(self, is_complete: torch.cuda.Event | None) -> None:
        """As `queue`, but the slot was emptied, since the adapter could not be copied."""
        self.has_failed = True
        self.queue(is_complete)

    def wait(self) -> None:
        """Let the current stream wait for the copy. This thread waits until the copy is queued, on a CPU until its end.

        A copy is queued at once if its adapter is in host memory, so this thread hardly ever waits on a GPU.
        """
        is_complete = self._queued.result()
        if is_complete is not None:
            is_complete.wait()


# Downloads have deadlines of their own, by their size; this is the last one, for what no other has seen.
FAR_TIMEOUT_S = 900.0
# Downloads at a time. One that is slow keeps a thread.
FAR_THREADS = 4


def checkpoint_reader(
    bank: Bank, spec: ModelSpec, brought: Brought | None = None, shard: Shard = WHOLE, ask: Inquire = answer
) -> Callable[[Adapter], HostAdapter]:
    """Reads PEFT folders into the kind of host memory from which copies into this bank are fastest.

    `spec` is the whole model's, and the bank is the shard's.
    """
    # Without the bank itself: a reader's thread may outlive its engine, and must not keep the device's memory.
    dtype, max_rank = bank.dtype, bank.max_rank
    work = pinning_workspace(bank.unpacks) if bank.device.type == "cuda" else PLAIN
    base = None if bank.base is None else weakref.ref(bank.base)
    embed_head = None if bank.embed_head is None else weakref.ref(bank.embed_head.base)
    folders, growth = brought or Brought(), bank.growth

    def read(adapter: Adapter) -> HostAdapter:
        seal = adapter.seals[shard.rank] if adapter.seals else ""
        with folders.place_of(adapter) as (path, root, key_root):
            ask_for = partial(ask, key=adapter.owner or "")
            below = None if base is None else base(), None if embed_head is None else embed_head()
            folder = path, spec, dtype, max_rank, root, work, key_root, shard
            try:
                read = read_checkpoint(*folder, *below, growth, seal, ask_for)
            except AdapterChangedError:
                raise AdapterChangedError(changed_since(adapter)) from None
        if growth is not None:
            growth.want(read.extras)
        return read

    return read


class AdapterLoader:
    """Each fetch and each load ends in one message, good or bad; `post` is called from any thread.

    `fetch`, `load` and `drop` are for one thread. An adapter is known from its fetch until it is dropped.
    """

    def __init__(
        self,
        bank: Bank,
        read: Callable[[Adapter], HostAdapter],
        post: Callable[[Message], None],
        overlaps: bool = True,
        ranks: int = 1,
    ) -> None:
        """Without overlap, every step behind a load waits for the copy, whether it uses the slot or not."""
        self._bank, self._post, self._overlaps = bank, post, overlaps
        # What becomes of a slot whose copy failed; the ranks of a group must hear of it.
        self._give_up = bank.clear if ranks == 1 else bank.spoil
        self._adapters: dict[AdapterId, Adapter] = {}
        self._copies: dict[AdapterId, Future[Copy]] = {}
        # Adapters that could not be fetched, and are still to be forgotten.
        self._refused: SimpleQueue[AdapterId] = SimpleQueue()
        prepare = partial(_prepare, bank.device) if bank.device.type == "cuda" else None
        self._reader = AdapterReader(read, prepare)
        # Reads that no request waits for have a thread of their own: they must not delay the others.
        self._idle_reader = AdapterReader(read, prepare)
        # So have sources, which may be slow. Started with the first: few engines have any.
        self._start_far_reader = partial(AdapterReader, read, prepare, FAR_TIMEOUT_S, FAR_THREADS)
        self._far_reader: AdapterReader | None = None
        self._copier = ThreadPoolExecutor(1, "adapter-copier")
        self._watcher = ThreadPoolExecutor(1, "adapter-watcher")
        self._stream: torch.cuda.Stream | None = None
        if bank.device.type == "cuda":
            self._stream = torch.cuda.Stream(bank.device)
            # The zeros of the bank were queued on the current stream.
            self._stream.wait_stream(torch.cuda.current_stream(bank.device))

    def fetch(self, adapter: Adapter, is_idle: bool = False) -> None:
        """Read an adapter into host memory, unless it is already there; does not wait.

        An idle fetch never makes another wait.
        """
        self._forget_refused()
        self._adapters[adapter.adapter_id] = adapter
        copy = self._copy_of(adapter, self._idle_reader if is_idle else self._reader)
        copy.add_done_callback(lambda copy: self._tell_fetched(adapter, copy.result()))

    def load(
        self,
        adapter_id: AdapterId,
        slot: Slot,
        is_free: torch.cuda.Event | None = None,
        pages: Sequence[int] = (),
        matrices: Sequence[int] = (),
    ) -> PendingCopy:
        """Copy an adapter into a slot, as soon as `is_free` has passed; it was fetched, and not dropped since.

        `is_free` is recorded on the compute stream behind the last step that reads the slot, or a former resident of
        the pages. Copies are made in the order of their loads if the adapters are in host memory: so a page's newest
        resident is the last that is copied, whichever slots had the page before.
        """
        adapter, pending = self._adapters[adapter_id], PendingCopy()

        def load_when_read(copy: Future[Copy]) -> None:
            copy_in = partial(self._copy_in, copy.result(), slot, pages, matrices)
            self._copier.submit(self._load, adapter, copy.result(), copy_in, is_free, pending)

        self._copy_of(adapter, self._reader).add_done_callback(load_when_read)
        if not self._overlaps:
            pending.wait()
        return pending

    def drop(self, adapter_id: AdapterId) -> None:
        """Forget an adapter and free its host memory; a load under way keeps it until it is done."""
        self._copies.pop(adapter_id, None)
        self._adapters.pop(adapter_id, None)

    def close(self) -> None:
        """Finish the read and the copies under way, refuse the reads that have not begun, and end all threads."""
        # In this order: a read that ends hands its copy to the copier, and the copier tells the watcher.
        self._reader.close()
        self._idle_reader.close()
        if self._far_reader is not None:
            self._far_reader.close()
        self._copier.shutdown()
        self._watcher.shutdown()

    @property
    def known(self) -> set[AdapterId]:
        """The adapters in host memory, and those that are on their way there."""
        return self._adapters.keys() | self._copies.keys()

    def _copy_of(self, adapter: Adapter, reader: AdapterReader) -> Future[Copy]:
        copy = self._copies.get(adapter.adapter_id)
        if copy is None or (copy.done() and isinstance(copy.result(), RefusedAdapter)):
            reader = self._far() if has_scheme(adapter.path) else reader
            copy = self._copies[adapter.adapter_id] = reader.submit(adapter)
        return copy

    def _far(self) -> AdapterReader:
        self._far_reader = self._far_reader or self._start_far_reader()
        return self._far_reader

    def _forget_refused(self) -> None:
        """An adapter that could not be fetched gets a new id when it is added again: its old id never comes back."""
        while not self._refused.empty():
            adapter_id = self._refused.get()
            copy = self._copies.get(adapter_id)
            if copy is not None and copy.done() and isinstance(copy.result(), RefusedAdapter):
                del self._adapters[adapter_id], self._copies[adapter_id]

    def _tell_fetched(self, adapter: Adapter, copy: Copy) -> None:
        if isinstance(copy, RefusedAdapter):
            self._refused.put(adapter.adapter_id)
            at = time.monotonic()
            self._post(AdapterFailed(adapter_id=adapter.adapter_id, at=at, reason=copy.reason, code=copy.code))
        else:
            self._post(
                AdapterFetched(
                    adapter_id=adapter.adapter_id,
                    at=time.monotonic(),
                    pages=self._bank.pages_of(copy),
                    size_bytes=copy.size_bytes,
                    matrices=copy.matrices,
                    rank=copy.rank,
                    seals=(copy.seal,) if copy.seal else (),
                )
            )

    def _load(
        self,
        adapter: Adapter,
        copy: Copy,
        copy_in: Callable[[], None],
        is_free: torch.cuda.Event | None,
        pending: PendingCopy,
    ) -> None:
        timed = TimedCopy(self._stream, is_free)
        try:
            with timed:
                copy_in()
        except Exception as error:  # the border of a thread: the scheduler must hear of any failure
            # The message first: it lies in the inbox before a step that waits is submitted.
            self._tell_failed(adapter, error)
            pending.fail(timed.is_complete)
        else:
            pending.queue(timed.is_complete)
            self._watcher.submit(self._tell_ready, adapter, copy, timed)

    def _copy_in(self, copy: Copy, slot: Slot, pages: Sequence[int], matrices: Sequence[int]) -> None:
        """A slot whose copy fails holds no adapter: a step that waits for it must not find half of one."""
        try:
            if isinstance(copy, RefusedAdapter):
                raise AdapterError(copy.reason)
            self._bank.copy_in(slot, copy, pages, matrices)
        except Exception:  # whatever it is, it goes on
            self._give_up(slot, pages)
            raise

    def _tell_ready(self, adapter: Adapter, _copy: Copy, timed: TimedCopy) -> None:
        """Blocks its thread until the copy is complete, and keeps the adapter's host memory until then."""
        try:
            copy_s = timed.wait()
        except Exception as error:  # the border of a thread: a device that failed says so here
            self._tell_failed(adapter, error)
        else:
            self._post(AdapterReady(adapter.adapter_id, time.monotonic(), copy_s))

    def _tell_failed(self, adapter: Adapter, error: Exception) -> None:
        self._post(AdapterFailed(adapter_id=adapter.adapter_id, at=time.monotonic(), reason=reason_for(adapter, error)))


def _prepare(device: torch.device) -> None:
    """A reader on all cores would delay the thread that launches steps; on a CPU the setting is the model's too.

    Memory is pinned for a thread's own device, which would be the first of several.
    """
    torch.set_num_threads(1)
    torch.cuda.set_device(device)
