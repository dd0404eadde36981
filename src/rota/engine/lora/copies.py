"""How an adapter gets from host memory to its slot: in one call of the driver, or line by line."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rota.engine.model.sites import SiteShape

# ── batched copy ────────────────────────────────────────────────────────────────────────────────────────────────────
# A batched copy gives the driver all copies of one adapter in one call, where the driver knows such a call.
#
# Without a staging buffer a Llama-8B adapter of rank 16 takes about 300 copies. One after the other through torch they
# take 4.8 ms, most of which the host spends on giving them. In one call they take 2.9 ms, through a staging buffer 2.1
# ms: the memory of such a buffer is better used for a slot (H200, driver 580, 2026-11-16).
#
# torch does not offer this call, so it is looked up in the driver's library: `cuMemcpyBatchAsync`, CUDA 12.8.

StretchTable = NDArray[np.int64]  # […, 2]: address and bytes of each stretch

IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM


class _MemoryLocation(ctypes.Structure):
    """CUmemLocation; zeros leave it to the driver to find out where an address lies."""

    _fields_ = (("kind", ctypes.c_int), ("number", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", _MemoryLocation),
        ("target_hint", _MemoryLocation),
        ("flags", ctypes.c_uint),
    )


def can_batch(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and _driver_call() is not None


def copy_stretches(targets: StretchTable, sources: StretchTable) -> None:
    """Copy a run that lies in `sources` to `targets`, on the current stream; the caller keeps both alive meanwhile."""
    copy_batch(cut_stretches(targets, sources))


def copy_batch(copies: NDArray[np.int64]) -> None:
    """Give the driver all copies in one call. [3, copies]: to, out of, bytes."""
    call = _driver_call()
    assert call is not None, "asked without can_batch"
    count, failed = copies.shape[1], ctypes.c_size_t()
    status = call(
        *((ctypes.c_uint64 * count).from_buffer(numbers) for numbers in copies),
        ctypes.c_size_t(count),
        ctypes.byref(_Attributes(source_order=IN_STREAM_ORDER)),
        ctypes.byref(ctypes.c_size_t(0)),  # these attributes hold from the first copy on
        ctypes.c_size_t(1),
        ctypes.byref(failed),
        ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
    )
    if status:
        raise RuntimeError(f"The driver refused copy {failed.value} of {count} of an adapter with error {status}.")


def cut_stretches(targets: StretchTable, sources: StretchTable) -> NDArray[np.int64]:
    """Copies of the same bytes in the same order, cut where either side ends. [3, copies]: to, out of, bytes."""
    to, out_of, sizes = cut(targets[:, 1], sources[:, 1])
    return np.stack([targets[to.row, 0] + to.first, sources[out_of.row, 0] + out_of.first, sizes])


class CopySide(NamedTuple):
    """One side of copies: of which stretch each is, and its first byte there."""

    row: NDArray[np.int64]
    first: NDArray[np.int64]


def cut(targets: NDArray[np.int64], sources: NDArray[np.int64]) -> tuple[CopySide, CopySide, NDArray[np.int64]]:
    """Stretches of so many bytes on two sides of a run: where copies of it lie on either side, and their bytes."""
    ends = [np.cumsum(side) for side in (targets, sources)]
    assert ends[0][-1] == ends[1][-1], "both sides hold the same bytes"
    last = np.union1d(*ends)
    last = last[last > 0]  # where nothing but stretches without bytes ended
    first = np.concatenate(([0], last[:-1]))
    to, out_of = (_find(side, at, first) for side, at in zip((targets, sources), ends, strict=True))
    return to, out_of, last - first


def _find(sizes: NDArray[np.int64], ends: NDArray[np.int64], first: NDArray[np.int64]) -> CopySide:
    """Where these bytes of a run lie on one side."""
    row = np.searchsorted(ends, first, side="right")
    return CopySide(row, first - (ends[row] - sizes[row]))


@cache
def _driver_call() -> Callable[..., int] | None:
    """None where there is no driver, or one from before the call."""
    try:
        library: Any = ctypes.CDLL("libcuda.so.1")
        call: Callable[..., int] = library.cuMemcpyBatchAsync
    except (OSError, AttributeError):
        return None
    return call


# ── lines ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# Lines are the contiguous stretches of a slot: without a staging buffer an adapter is copied line by line.
#
#     a slot's A at one site of one layer    | part 0: rank rows, zeros | part 1: rank rows, zeros |
#                                            └── a line ──┘             └── a line ──┘
#
# A line is what one copy from host memory can fill without a buffer on the device. An adapter of full rank has one line
# for all parts of a site. Llama-8B's adapters have 256 lines then, else 352.
#
# A slot that takes pages has as many lines in each of them. They follow the run of an adapter: all ranks of a part,
# page by page, before the next part.


def line_count(shapes: Sequence[SiteShape], layers: int) -> int:
    """The most lines of a slot."""
    return layers * sum(len(shape.parts) + 1 for shape in shapes)


def lines_of(a: Tensor, b: Tensor, places: Sequence[int], rank: int) -> list[Tensor]:
    """The lines of a site of this rank in these places, in the order of an adapter's run: A of all layers, then B.

    a: [layers, all places, parts * place_rank, inputs]; b: [layers, all places, place_rank, outputs].
    """
    layers, place_rank = b.shape[0], b.shape[2]
    if rank == place_rank:
        return [line for factor in (a, b) for line in factor[:, places[0]].view(layers, -1).unbind()]
    shares = shares_of(places, rank, place_rank)
    parts = a.unflatten(2, (-1, place_rank)).transpose(1, 2)  # [layers, parts, all places, place_rank, inputs]
    a_lines = [part[place, :count].view(-1) for each in parts.unbind() for part in each for place, count in shares]
    return [*a_lines, *(each[place, :count].view(-1) for each in b.unbind() for place, count in shares)]


def stretches_of(a: Tensor, b: Tensor, places: Sequence[int], rank: int) -> StretchTable:
    """As `lines_of`, but each line as its address and its bytes: a view of each takes longer than the driver's call."""
    place_rank = b.shape[2]
    shares = shares_of(places, rank, place_rank)
    if rank == place_rank:
        of_a = part_stretches(a, 1, [(places[0], a.shape[2])])
    else:
        of_a = part_stretches(a, a.shape[2] // place_rank, shares)
    return np.concatenate([each.reshape(-1, 2) for each in (of_a, part_stretches(b, 1, shares))])


def part_stretches(factor: Tensor, parts: int, shares: Sequence[tuple[int, int]]) -> StretchTable:
    """[layers, parts, shares, 2] of a factor [layers, all places, parts * rows, width]."""
    layer, place, row = (stride * factor.itemsize for stride in factor.stride()[:3])
    places, counts = np.array(shares, np.int64).T
    layers = np.arange(factor.shape[0])[:, None, None] * layer
    within = np.arange(parts)[:, None] * (factor.shape[2] // parts * row)
    addresses = factor.data_ptr() + layers + within + places * place  # [layers, parts, shares]
    sizes = np.broadcast_to(counts * row, addresses.shape)
    return np.stack([addresses, sizes], axis=-1)


def shares_of(places: Sequence[int], rank: int, place_rank: int) -> list[tuple[int, int]]:
    """(place, ranks in it) of a site of this rank; places that the site does not need are left out."""
    needed = places[: -(-rank // place_rank)]
    return [(place, min(place_rank, rank - nth * place_rank)) for nth, place in enumerate(needed)]


def copy_lines(lines: Sequence[Tensor], pieces: Sequence[Tensor]) -> None:
    """Copy a run that lies in pieces to its lines, without waiting if the pieces are pinned.

    One call gives all copies: Python's lock is free meanwhile, and the thread that launches steps is not held up.
    """
    ends = [np.cumsum([each.numel() for each in side]) for side in (lines, pieces)]
    assert ends[0][-1] == ends[1][-1], "an adapter has as many numbers as its lines"
    borders = np.union1d(*ends)
    targets, sources = (_cut(side, at, borders) for side, at in zip((lines, pieces), ends, strict=True))
    torch._foreach_copy_(targets, sources, non_blocking=True)


def _cut(tensors: Sequence[Tensor], ends: NDArray[np.int64], borders: NDArray[np.int64]) -> list[Tensor]:
    """A run that lies in tensors, which end at `ends` of it, cut at all borders."""
    firsts = ends - [tensor.numel() for tensor in tensors]
    inner = zip(np.searchsorted(borders, firsts, "right"), np.searchsorted(borders, ends), strict=True)
    cuts = [(borders[low:high] - first).tolist() for (low, high), first in zip(inner, firsts, strict=True)]
    return [part for tensor, at in zip(tensors, cuts, strict=True) for part in tensor.tensor_split(at) if part.numel()]
