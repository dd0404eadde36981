"""The bank is the vault behind the slot ledger: it holds adapters on the device, and knows only slot numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rota.core.adapter import Extra
from rota.core.errors import AdapterError
from rota.core.ids import Slot
from rota.engine.device import send, zeros
from rota.engine.lora.base import BaseMatrices
from rota.engine.lora.copies import can_batch, copy_lines, copy_stretches, line_count, lines_of, shares_of, stretches_of
from rota.engine.lora.embed_head import EmbedHeadBank
from rota.engine.lora.files.ranks import PAGE_RANK, pages_for
from rota.engine.lora.gain_bias import SlotGainBias
from rota.engine.lora.growth import SlotGrowth
from rota.engine.lora.host import HostAdapter, StackedSite, run_length, stacked_sites
from rota.engine.lora.layout import SiteFactors
from rota.engine.lora.packing import Unpacker, unturned_bytes
from rota.engine.model.sites import SITES, site_shapes
from rota.engine.model.spec import ModelSpec

# A copy from host memory takes a GPU about a microsecond besides its bytes: the time of 64 KiB at 50 GB/s. Where lines
# are shorter, one copy into a staging buffer is faster than a copy for each line. Such a buffer is small: a model with
# 352 lines a slot has one of 22 MiB at most. `benchmarks/adapter_copy.py --stage on off` compares both ways.
SHORT_LINE_BYTES = 64 << 10
NOTHING_FUSED: Mapping[str, Tensor] = {}
NO_ROOM = (
    "The adapter needs memory on the device that could not be had; start the server with this adapter among its "
    "--lora-paths."
)


def slot_bytes(spec: ModelSpec, max_rank: int, dtype: torch.dtype) -> int:
    """The bytes of one slot's factors on the device."""
    return run_length(site_shapes(spec), spec.layers, [max_rank] * len(SITES)) * dtype.itemsize


def pays_staging(spec: ModelSpec, place_rank: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Is an adapter copied sooner through a staging buffer of its size? Never where all its copies are one call."""
    if can_batch(device):
        return False
    lines = line_count(site_shapes(spec), spec.layers)
    return device.type != "cpu" and slot_bytes(spec, place_rank, dtype) < lines * SHORT_LINE_BYTES


class Bank:
    """The factors of all adapters in slots, per site [layers, places, …]; beyond a slot's rank they are zero.

    Each slot has a place of its own, of the largest rank. Or the places are pages, which slots share.
    A site's A lie in its fused LoRA A, [layers, places * parts * place_rank, inputs], if it has one.
    """

    def __init__(
        self,
        spec: ModelSpec,
        slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        fused_lora_a: Mapping[str, Tensor] = NOTHING_FUSED,
        has_stage: bool | None = None,
        pages: int = 0,
        base: BaseMatrices | None = None,
        embed_head: EmbedHeadBank | None = None,
        extras: Extra = Extra.NONE,
        growth: SlotGrowth | None = None,
        unpacks: bool = False,
    ) -> None:
        """With a stage, or without it, or by default with it where it pays. With pages, or without them.

        Only a bank that `unpacks` takes packed adapters; its copies must be batched.
        Adapters are read against a `base`. Slots have gains and biases if they are among the `extras`, and
        factors for `embed_head` if it is there; with `growth` both may come later.
        """
        places, place_rank = (pages, PAGE_RANK) if pages else (slots, max_rank)
        if has_stage is None:
            has_stage = pays_staging(spec, place_rank, dtype, device)
        self.slots, self.max_rank, self.dtype, self.device = slots, max_rank, dtype, device
        self._factor_bytes = places * slot_bytes(spec, place_rank, dtype)
        self._factor_bytes += has_stage * slot_bytes(spec, max_rank, dtype)
        self._factor_bytes += unpacks * unturned_bytes(spec, max_rank, dtype)
        self.base, self.embed_head, self.growth = base, embed_head, growth
        self._place_rank = place_rank
        self.layers = spec.layers
        self._shapes = site_shapes(spec)
        self._a = [
            fused_lora_a[shape.name].unflatten(1, (places, -1))
            if shape.name in fused_lora_a
            else zeros((spec.layers, places, len(shape.parts) * place_rank, shape.inputs), dtype, device)
            for shape in self._shapes
        ]
        self._b = [zeros((spec.layers, places, place_rank, shape.outputs), dtype, device) for shape in self._shapes]
        self._table: Tensor | None = None
        if pages:
            self._table = torch.zeros(slots, pages_for(max_rank), dtype=torch.int32, device=device)
        self._ranks = torch.zeros(spec.layers, len(SITES), slots, dtype=torch.int32, device=device)
        # By place and site: how many ranks are not zero.
        self._filled = [[0] * len(SITES) for _ in range(places)]
        self._generations = [0] * slots
        self._gain_bias: SlotGainBias | None = None
        self.extras = Extra.NONE if embed_head is None else embed_head.extras
        self.grow(extras)
        self._is_batching = can_batch(device)
        self._unpacker = Unpacker(self._a, self._b, self._shapes, max_rank) if unpacks else None
        # With a stage, an adapter arrives here on the device; then each factor is copied to its place.
        self._stage: Tensor | None = None
        if has_stage:
            longest = run_length(self._shapes, spec.layers, [max_rank] * len(SITES))
            self._stage = torch.empty(longest, dtype=dtype, device=device)

    @property
    def unpacks(self) -> bool:
        """Does it take packed adapters?"""
        return self._unpacker is not None

    @property
    def size_bytes(self) -> int:
        gain_bias = 0 if self._gain_bias is None else self._gain_bias.size_bytes
        return self._factor_bytes + gain_bias + (0 if self.embed_head is None else self.embed_head.size_bytes)

    @torch.inference_mode()
    def grow(self, extras: Extra) -> None:
        """Slots have these extras from now on, besides what they had; what `factors` gave before is out of date."""
        gain_bias = self._gain_bias
        if Extra.GAIN_BIAS in extras and gain_bias is None:
            gain_bias = SlotGainBias(self._shapes, self.slots, self.layers, self.device)
        if self.embed_head is not None:
            self.embed_head.grow(self.extras | extras)
        self._gain_bias, self.extras = gain_bias, self.extras | extras

    def factors(self, layer: int, site: str) -> SiteFactors:
        """What the operations read at one site of one layer; the tensors never change their address while it holds."""
        index = SITES.index(site)
        a, b, ranks = self._a[index][layer], self._b[index][layer], self._ranks[layer, index]
        gain_bias = None if self._gain_bias is None else self._gain_bias.at(layer, index)
        return SiteFactors(self._shapes[index], a, b, ranks, self._table, gain_bias)

    def generation(self, slot: int) -> int:
        """How many adapters were copied into the slot so far: what is made from its factors has this age."""
        return self._generations[slot]

    def pages_of(self, adapter: HostAdapter) -> int:
        """How many pages the adapter takes in a slot; 0 if slots have places of their own."""
        return 0 if self._table is None else max(1, pages_for(max(adapter.site_ranks)))

    @torch.inference_mode()
    def copy_in(
        self, slot: Slot, adapter: HostAdapter, pages: Sequence[int] = (), matrices: Sequence[int] = ()
    ) -> None:
        """Replace the slot's adapter; queued on the current stream, from pinned memory without waiting.

        No step may read the slot, the pages or the matrices meanwhile. Copies must not be queued on two streams at a
        time.
        """
        places = self._places(slot, pages)
        assert len(places) * self._place_rank >= max(adapter.site_ranks), "a rank has no page"
        if adapter.extras & ~self.extras:
            raise AdapterError(NO_ROOM)
        if not any(adapter.site_ranks):
            pass  # it has factors at the ends alone
        elif adapter.packing is not None:
            assert self._unpacker is not None, "a bank that does not unpack was given a packed adapter"
            self._unpacker.unpack(places, adapter.pieces, adapter.packing)
        elif self._stage is None:
            self._copy_to_lines(places, adapter)
        else:
            run = self._stage[: sum(piece.numel() for piece in adapter.pieces)]
            copy_lines([run], adapter.pieces)
            for index, site in enumerate(stacked_sites(run, self._shapes, self.layers, adapter.site_ranks)):
                self._place(places, index, site)
        for index, rank in enumerate(adapter.site_ranks):
            self._clear_beyond(places, index, rank)
        self._write_pages(slot, pages)
        self._copy_extras(slot, adapter, matrices)
        self._ranks[:, :, slot].copy_(adapter.ranks, non_blocking=True)
        self._generations[slot] += 1

    @torch.inference_mode()
    def clear(self, slot: Slot, pages: Sequence[int] = ()) -> None:
        """Leave the slot without an adapter, whatever a copy that failed has written; queued as `copy_in` is."""
        self._ranks[:, :, slot].zero_()
        self._copy_extras(slot, None)
        for place in self._places(slot, pages):
            self._filled[place] = [self._place_rank] * len(SITES)
        self._generations[slot] += 1

    @torch.inference_mode()
    def spoil(self, slot: Slot, pages: Sequence[int] = ()) -> None:
        """As `clear`, but rows of the slot compute NaN, so that the other ranks hear of the loss by their sums.

        In A, since the product with B also runs for rows of other slots, with zeros in the place of x Aᵀ.
        """
        self.clear(slot, pages)
        self._write_pages(slot, pages)
        index, place = SITES.index("down"), self._places(slot, pages)[0]
        self._parts(place, index)[-1, 0, 0] = torch.nan
        self._b[index][-1, place, 0] = 1.0
        self._ranks[-1, index, slot] = 1

    def _copy_extras(self, slot: Slot, adapter: HostAdapter | None, matrices: Sequence[int] = ()) -> None:
        if self._gain_bias is not None:
            self._gain_bias.copy_in(slot, None if adapter is None else adapter.gain_bias)
        if self.embed_head is not None:
            self.embed_head.copy_in(slot, adapter, matrices)

    def _places(self, slot: Slot, pages: Sequence[int]) -> tuple[int, ...]:
        """Where the slot's ranks lie, in their order."""
        assert bool(pages) == (self._table is not None), "a load names pages if the bank has pages"
        return tuple(pages) or (slot,)

    def _write_pages(self, slot: Slot, pages: Sequence[int]) -> None:
        if self._table is not None:
            self._table[slot, : len(pages)] = send(np.array(pages, np.int32), self.device)

    def _copy_to_lines(self, places: Sequence[int], adapter: HostAdapter) -> None:
        sites = [each for each in zip(self._a, self._b, adapter.site_ranks, strict=True) if each[2]]
        if self._is_batching:
            targets = np.concatenate([stretches_of(a, b, places, rank) for a, b, rank in sites])
            copy_stretches(targets, np.array([(piece.data_ptr(), piece.nbytes) for piece in adapter.pieces]))
        else:
            copy_lines([line for a, b, rank in sites for line in lines_of(a, b, places, rank)], adapter.pieces)

    def _place(self, places: Sequence[int], index: int, site: StackedSite) -> None:
        first = 0
        for place, count in shares_of(places, site.b.shape[1], self._place_rank):
            self._parts(place, index)[:, :, :count] = site.a[:, :, first : first + count]
            self._b[index][:, place, :count] = site.b[:, first : first + count]
            first += count

    def _clear_beyond(self, places: Sequence[int], index: int, rank: int) -> None:
        """What former residents of a larger rank have left; with pages there may have been several."""
        shares = dict(shares_of(places, rank, self._place_rank))
        for place in places:
            count, former = shares.get(place, 0), self._filled[place][index]
            if count < former:
                self._parts(place, index)[:, :, count:former].zero_()
                self._b[index][:, place, count:former].zero_()
            self._filled[place][index] = count

    def _parts(self, place: int, index: int) -> Tensor:
        """A in one place at one site, part by part: [layers, parts, place_rank, inputs]."""
        return self._a[index][:, place].unflatten(1, (-1, self._place_rank))
