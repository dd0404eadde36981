"""A HostAdapter is an adapter in host memory, stacked and scaled, so that a load only copies."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from rota.core.adapter import Extra
from rota.engine.lora.packing import Packing
from rota.engine.model.sites import SiteShape
from rota.machine import usable_processors

# ── side by side ────────────────────────────────────────────────────────────────────────────────────────────────────
# Side by side, a few jobs take less time than one after the other, where they wait for memory and disks.

# More threads than this read no faster: memory is the limit.
MOST_THREADS = 8

Result = TypeVar("Result")


def threads_for_reads() -> int:
    """Half of the processors that this process may use: the others launch steps and serve clients."""
    return max(1, min(MOST_THREADS, usable_processors() // 2))


def cut_evenly(count: int, parts: int) -> list[range]:
    """The numbers below `count` in so many ranges, or in fewer if there are not so many."""
    parts = max(1, min(count, parts))
    bounds = [count * part // parts for part in range(parts + 1)]
    return [range(first, last) for first, last in pairwise(bounds)]


def side_by_side(jobs: Sequence[Callable[[], Result]]) -> list[Result]:
    """What all jobs gave, as they ended; raises the first error of one. The last job runs in this thread."""
    results: list[Result] = []
    errors: list[Exception] = []
    ended = threading.Semaphore(0)

    def work(job: Callable[[], Result]) -> None:
        try:
            results.append(job())
        except Exception as error:  # the border of a thread: the caller raises it
            errors.append(error)
        ended.release()

    # No pool: the end of a process must not wait for a disk that hangs. And no Thread: it is waited for until it runs,
    # a quarter of a millisecond each beside a thread that launches steps.
    for job in jobs[:-1]:
        _thread.start_new_thread(work, (job,))
    for job in jobs[-1:]:
        work(job)
    for _ in jobs:
        ended.acquire()
    for error in errors:
        raise error
    return results


# Larger, and pinning would keep steps from being launched; smaller, and an adapter would take more calls.
PIECE_BYTES = 2 << 20
PAUSE_S = 0.001
# Memory that torch had pinned before is there in less time than this.
PINNED_S = 0.0001


@dataclass(frozen=True, slots=True)
class EmbedHeadFactors:
    """The factors of the embedding or of the head."""

    a: Tensor  # [rank, hidden] of the head; [vocabulary, rank] of the embedding, which is looked up
    b: Tensor  # [rank, outputs], alpha / rank folded in
    gain_bias: Tensor | None = None  # [2, outputs] float32: gains and shifts, of a DoRA or a head with a bias of B

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.a, self.b) if self.gain_bias is None else (self.a, self.b, self.gain_bias)

    def pinned(self) -> EmbedHeadFactors:
        return EmbedHeadFactors(*(tensor.pin_memory() for tensor in self.tensors))


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """All factors in one run of numbers: site after site, A before B, each for all layers. Or packed, as a file is."""

    pieces: tuple[Tensor, ...]  # the run, whole or as `pin` cuts it; the bytes of the file, if it is packed
    site_ranks: tuple[int, ...]  # in the order of SITES: the largest rank of any layer and part, or 0
    ranks: Tensor  # [layers, len(SITES)] int32, as SiteFactors.ranks has them
    gain_bias: Tensor | None = None  # [layers, numbers of a layer] float32 (gain_bias.py): DoRA's, or biases
    embedding: EmbedHeadFactors | None = None
    head: EmbedHeadFactors | None = None
    own_embedding: tuple[Tensor, ...] | None = None  # [vocabulary, hidden] in pieces, in the place of the model's
    own_head: tuple[Tensor, ...] | None = None  # the same of the head, of this rank's tokens
    packing: Packing | None = None
    seal: str = ""  # of the files that it was read from

    @property
    def extras(self) -> Extra:
        """What its slot must have."""
        embed_head = [end for end in (self.embedding, self.head) if end is not None]
        has_gain_bias = self.gain_bias is not None or any(end.gain_bias is not None for end in embed_head)
        extras = Extra.GAIN_BIAS if has_gain_bias else Extra.NONE
        extras |= Extra.NONE if self.embedding is None else Extra.EMBEDDING
        return extras | (Extra.NONE if self.head is None else Extra.HEAD)

    @property
    def matrices(self) -> int:
        """How many places for own matrices it takes."""
        return (self.own_embedding is not None) + (self.own_head is not None)

    @property
    def extra_tensors(self) -> tuple[Tensor, ...]:
        """All numbers but those of the layers' factors."""
        gain_bias = () if self.gain_bias is None else (self.gain_bias,)
        ends = (tensor for end in (self.embedding, self.head) if end for tensor in end.tensors)
        return (*gain_bias, *ends, *(self.own_embedding or ()), *(self.own_head or ()))

    @property
    def rank(self) -> int:
        """The largest of any factor."""
        return max(*self.site_ranks, *(end.b.shape[0] for end in (self.embedding, self.head) if end))

    @property
    def size_bytes(self) -> int:
        return sum(each.nbytes for each in (*self.pieces, *self.extra_tensors))


@dataclass(frozen=True, slots=True)
class StackedSite:
    """One site in all layers; a factor of a smaller rank than the site's is filled with zeros."""

    a: Tensor  # [layers, parts, rank, inputs]
    b: Tensor  # [layers, rank, outputs], alpha / rank folded in


def run_length(shapes: Sequence[SiteShape], layers: int, site_ranks: Sequence[int]) -> int:
    """The length of the run of an adapter with these ranks."""
    return sum(layers * rank * _width(shape) for shape, rank in zip(shapes, site_ranks, strict=True))


def stacked_sites(
    run: Tensor, shapes: Sequence[SiteShape], layers: int, site_ranks: Sequence[int]
) -> list[StackedSite]:
    """The sites of a run, as views of it."""
    sites, at = [], 0
    for shape, rank in zip(shapes, site_ranks, strict=True):
        end = at + layers * rank * _width(shape)
        middle = end - layers * rank * shape.outputs
        a = run[at:middle].view(layers, len(shape.parts), rank, shape.inputs)
        b = run[middle:end].view(layers, rank, shape.outputs)
        sites.append(StackedSite(a, b))
        at = end
    return sites


def pin(run: Tensor, threads: int = 1) -> tuple[Tensor, ...]:
    """A copy in pinned memory, in pieces; blocks for two milliseconds for each that is new.

    In pieces and with pauses, because pinning holds a lock of the driver that every launch needs. 84 MB at once kept a
    decode loop (4 ms a step) from launching for 55 ms, pieces of 1 MB for 0.4 ms, on an H200 with torch 2.11. torch
    keeps freed pieces for the next adapter, so a full host cache pins no more memory.
    """
    return copied(run, lambda part: pinned_bytes(part.nbytes).view(part.dtype), threads)


def copied(run: Tensor, memory: Callable[[Tensor], Tensor], threads: int = 1) -> tuple[Tensor, ...]:
    """A copy in pieces, each in memory of its own, which is asked for one by one."""
    parts = run.split(PIECE_BYTES // run.itemsize)
    pieces = tuple(map(memory, parts))

    def copy(numbers: range) -> None:
        # In one call: each takes the lock of the interpreter when it ends.
        torch._foreach_copy_(pieces[numbers.start : numbers.stop], parts[numbers.start : numbers.stop])

    side_by_side([partial(copy, numbers) for numbers in cut_evenly(len(parts), threads)])
    return pieces


def pinned_bytes(size: int) -> Tensor:
    """[size] uint8, whatever they are now; blocks longer where memory had to be pinned."""
    begun_at = time.perf_counter()
    memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    if time.perf_counter() - begun_at > PINNED_S:
        time.sleep(PAUSE_S)
    return memory


def pinned(adapter: HostAdapter, threads: int = 1) -> HostAdapter:
    """The same in pinned memory; blocks as `pin` does."""
    return replace(
        adapter,
        pieces=_pinned(adapter.pieces, threads) or (),
        ranks=adapter.ranks.pin_memory(),
        gain_bias=None if adapter.gain_bias is None else adapter.gain_bias.pin_memory(),
        embedding=None if adapter.embedding is None else adapter.embedding.pinned(),
        head=None if adapter.head is None else adapter.head.pinned(),
        own_embedding=_pinned(adapter.own_embedding, threads),
        own_head=_pinned(adapter.own_head, threads),
    )


def _pinned(pieces: tuple[Tensor, ...] | None, threads: int) -> tuple[Tensor, ...] | None:
    return None if pieces is None else tuple(part for piece in pieces for part in pin(piece, threads))


def _width(shape: SiteShape) -> int:
    """The numbers of one rank of one layer."""
    return len(shape.parts) * shape.inputs + shape.outputs
