"""The bank is the vault behind the slot ledger: it holds adapters on the device, and knows only slot numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rota.core.ids import Slot
from rota.engine.lora.batched_copy import Stretch, can_batch, copy_stretches
from rota.engine.lora.host import HostAdapter, StackedSite, run_length, stacked_sites
from rota.engine.lora.layout import SiteFactors
from rota.engine.lora.lines import copy_lines, line_count, lines_of
from rota.engine.model.sites import SITES, site_shapes
from rota.engine.model.spec import ModelSpec

REMEMBERED_STRETCHES = 256
# A copy from host memory takes a GPU about a microsecond besides its bytes: the time of 64 KiB at 50 GB/s. Where lines
# are shorter, one copy into a staging buffer is faster than a copy for each line. Such a buffer is small: a model with
# 352 lines a slot has one of 22 MiB at most. `benchmarks/adapter_copy.py --stage on off` compares both ways.
SHORT_LINE_BYTES = 64 << 10
NO_ANNEXES: Mapping[str, Tensor] = {}


def slot_bytes(spec: ModelSpec, max_rank: int, dtype: torch.dtype) -> int:
    """The bytes of one slot on the device."""
    return run_length(site_shapes(spec), spec.layers, [max_rank] * len(SITES)) * dtype.itemsize


def pays_staging(spec: ModelSpec, max_rank: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Is an adapter copied sooner through a staging buffer of its size? Never where all its copies are one call."""
    if can_batch(device):
        return False
    lines = line_count(site_shapes(spec), spec.layers)
    return device.type != "cpu" and slot_bytes(spec, max_rank, dtype) < lines * SHORT_LINE_BYTES


class Bank:
    """The factors of every slot, per site [layers, slots, …]; beyond a slot's rank they are zero.

    A site's A lie in its annex, [layers, slots * parts * max_rank, inputs], if it has one.
    """

    def __init__(
        self,
        spec: ModelSpec,
        slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        annexes: Mapping[str, Tensor] = NO_ANNEXES,
        has_stage: bool | None = None,
    ) -> None:
        """With a stage, or without it, or by default with it where it pays."""
        if has_stage is None:
            has_stage = pays_staging(spec, max_rank, dtype, device)
        self.slots = slots
        self.max_rank = max_rank
        self.dtype = dtype
        self.device = device
        self.size_bytes = (slots + has_stage) * slot_bytes(spec, max_rank, dtype)
        self.layers = spec.layers
        self._shapes = site_shapes(spec)
        self._a = [
            annexes[shape.name].unflatten(1, (slots, -1))
            if shape.name in annexes
            else _zeros((spec.layers, slots, len(shape.parts) * max_rank, shape.inputs), dtype, device)
            for shape in self._shapes
        ]
        self._b = [_zeros((spec.layers, slots, max_rank, shape.outputs), dtype, device) for shape in self._shapes]
        self._ranks = torch.zeros(spec.layers, len(SITES), slots, dtype=torch.int32, device=device)
        # By slot and site: how many ranks are not zero.
        self._filled = [[0] * len(SITES) for _ in range(slots)]
        self._generations = [0] * slots
        self._is_batching = can_batch(device)
        self._stretches: dict[tuple[int, tuple[int, ...]], list[Stretch]] = {}  # by slot and the ranks of an adapter
        # With a stage, an adapter arrives here on the device; then each factor is copied to its place.
        self._stage: Tensor | None = None
        if has_stage:
            longest = run_length(self._shapes, spec.layers, [max_rank] * len(SITES))
            self._stage = torch.empty(longest, dtype=dtype, device=device)

    def factors(self, layer: int, site: str) -> SiteFactors:
        """What the operations read at one site of one layer; the tensors never change their address."""
        index = SITES.index(site)
        return SiteFactors(self._shapes[index], self._a[index][layer], self._b[index][layer], self._ranks[layer, index])

    def generation(self, slot: int) -> int:
        """How many adapters were copied into the slot so far: what is made from its factors has this age."""
        return self._generations[slot]

    @torch.inference_mode()
    def copy_in(self, slot: Slot, adapter: HostAdapter) -> None:
        """Replace the slot's adapter; queued on the current stream, from pinned memory without waiting.

        No step may read the slot meanwhile, and copies must not be queued on two streams at a time.
        """
        if self._stage is None:
            self._copy_to_lines(slot, adapter)
        else:
            run = self._arrive(self._stage, adapter.pieces)
            for index, site in enumerate(stacked_sites(run, self._shapes, self.layers, adapter.site_ranks)):
                self._place(slot, index, site)
        for index, rank in enumerate(adapter.site_ranks):
            self._clear_beyond(slot, index, rank)
        self._ranks[:, :, slot].copy_(adapter.ranks, non_blocking=True)
        self._generations[slot] += 1

    @torch.inference_mode()
    def clear(self, slot: Slot) -> None:
        """Leave the slot without an adapter, whatever a copy that failed has written; queued as `copy_in` is."""
        self._ranks[:, :, slot].zero_()
        self._filled[slot] = [self.max_rank] * len(SITES)
        self._generations[slot] += 1

    @torch.inference_mode()
    def spoil(self, slot: Slot) -> None:
        """As `clear`, but rows of the slot get numbers that are none: the other ranks hear of the loss by their sums.

        In A, since the product with B also runs for rows of other slots, with zeros in the place of x Aᵀ.
        """
        self.clear(slot)
        index = SITES.index("down")
        self._parts(slot, index)[-1, 0, 0] = torch.nan
        self._b[index][-1, slot, 0] = 1.0
        self._ranks[-1, index, slot] = 1

    def _arrive(self, stage: Tensor, pieces: Sequence[Tensor]) -> Tensor:
        run = stage[: sum(piece.numel() for piece in pieces)]
        for target, piece in zip(torch.split(run, pieces[0].numel()), pieces, strict=True):
            target.copy_(piece, non_blocking=True)
        return run

    def _copy_to_lines(self, slot: Slot, adapter: HostAdapter) -> None:
        if not self._is_batching:
            copy_lines(self._lines(slot, adapter.site_ranks), adapter.pieces)
            return
        key = (slot, adapter.site_ranks)
        if key not in self._stretches:
            if len(self._stretches) >= REMEMBERED_STRETCHES:
                self._stretches.clear()
            # Addresses never change, and making the views of a slot's lines takes the host longer than the copy's call.
            self._stretches[key] = _stretches(self._lines(slot, adapter.site_ranks))
        copy_stretches(self._stretches[key], _stretches(adapter.pieces))

    def _lines(self, slot: Slot, site_ranks: Sequence[int]) -> list[Tensor]:
        factors = zip(self._a, self._b, site_ranks, strict=True)
        return [line for a, b, rank in factors if rank for line in lines_of(a[:, slot], b[:, slot], rank)]

    def _place(self, slot: Slot, index: int, site: StackedSite) -> None:
        a, b, rank = self._parts(slot, index), self._b[index][:, slot], site.b.shape[1]
        a[:, :, :rank] = site.a
        b[:, :rank] = site.b

    def _clear_beyond(self, slot: Slot, index: int, rank: int) -> None:
        """What a former resident of a larger rank has left."""
        former = self._filled[slot][index]
        if rank < former:
            self._parts(slot, index)[:, :, rank:former].zero_()
            self._b[index][:, slot, rank:former].zero_()
        self._filled[slot][index] = rank

    def _parts(self, slot: Slot, index: int) -> Tensor:
        """A of a slot at one site, part by part: [layers, parts, max_rank, inputs]."""
        return self._a[index][:, slot].unflatten(1, (-1, self.max_rank))


def _stretches(tensors: Sequence[Tensor]) -> list[Stretch]:
    return [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    # The system allocates the pages of NumPy's zeros at the first write: an empty slot costs nothing.
    raw = np.zeros(int(np.prod(size)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(size)
