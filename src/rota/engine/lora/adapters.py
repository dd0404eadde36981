"""Adapters carries out a plan's orders for adapters, and knows which slot each row's tokens go through."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rota.core.adapter import Adapter
from rota.core.ids import BASE, AdapterId, Row, Slot
from rota.core.messages import Message
from rota.core.plan import Load, StepPlan
from rota.engine.lora.bank import Bank
from rota.engine.lora.batch import BatchFrame, make_batch, tile_size_for
from rota.engine.lora.deferred import Output
from rota.engine.lora.embed_head import EmbedHead
from rota.engine.lora.host import HostAdapter
from rota.engine.lora.layout import SiteFactors
from rota.engine.lora.loader import AdapterLoader, PendingCopy
from rota.engine.model.linear import Projection
from rota.engine.model.sites import SITES
from rota.engine.step.device_step import LoraBatch

LOG = logging.getLogger("rota.engine")

Numbers = NDArray[np.int32]
# A projection of x, plus what each token's adapter adds.
Project = Callable[[Projection, Tensor, SiteFactors, LoraBatch], Output]

# The slot of a row whose adapter is in no slot: such a row must not be in a step.
NO_SLOT = -1


class Adapters:
    """Bank, loader, and the map from rows to slots."""

    def __init__(
        self,
        bank: Bank,
        read: Callable[[Adapter], HostAdapter],
        project: Project,
        rows: int,
        overlaps: bool,
        ranks: int = 1,
        check: Callable[[Adapter], str] = lambda _: "",
        embed_head: EmbedHead | None = None,
    ) -> None:
        self.bank = bank
        self.embed_head = embed_head
        # Why an adapter cannot be served, from its config and headers; empty if it can. From any thread; blocks.
        self.check = check
        self._project = project
        self._factors = self._all_factors()
        self._post: Callable[[Message], None] | None = None
        self._loader = AdapterLoader(bank, read, self._tell, overlaps, ranks)
        # What brought each slot its resident.
        self._loaded: dict[Slot, Load] = {}
        # Copies that no step has waited for, and those that failed, until their slot gets its next copy.
        self._pending: dict[Slot, PendingCopy] = {}
        self._adapter_of_row: NDArray[np.int64] = np.full(rows + 1, BASE)
        # Of the steps that are submitted and not collected, in their order.
        self._flying_slots: deque[Numbers] = deque()
        # Base rows and the padding row have the number one past the last slot.
        self._slot_of_row: Numbers = np.full(rows + 1, bank.slots, np.int32)

    def listen(self, post: Callable[[Message], None]) -> None:
        """Send messages about adapters to `post`; it replaces the one given before."""
        self._post = post

    def close(self) -> None:
        """End the loader's threads; no plan may be accepted afterwards."""
        self._loader.close()

    def _tell(self, message: Message) -> None:
        assert self._post is not None, "`listen` must be called before adapters are loaded"
        self._post(message)

    def grow(self) -> bool:
        """Make room for what adapters have that were read; true if steps with adapters read other memory from now on.

        Before the plan that orders their copies. It waits for the device: steps may still read what is replaced.
        """
        growth, bank = self.bank.growth, self.bank
        if growth is None or not (due := growth.due()):
            return False
        if bank.device.type == "cuda":
            torch.cuda.synchronize(bank.device)
        try:
            bank.grow(due)
        except (torch.OutOfMemoryError, MemoryError):
            growth.end(has_grown=False)  # the adapter's copy fails, with what to do
            return False
        growth.end(has_grown=True)
        self._factors = self._all_factors()
        LOG.info("Slots have room for %s now: %.0f MB for adapters.", due.name, bank.size_bytes / 1e6)
        return True

    def _all_factors(self) -> list[dict[str, SiteFactors]]:
        return [{site: self.bank.factors(layer, site) for site in SITES} for layer in range(self.bank.layers)]

    def accept(self, plan: StepPlan) -> None:
        """Start the plan's fetches and loads; a GPU does not wait, nor does a CPU unless loading must not overlap."""
        if plan.reads or plan.loads or plan.drops:
            self._order(plan)
        for seat in plan.seats:
            self._adapter_of_row[seat.row] = seat.adapter_id
            self._slot_of_row[seat.row] = self.bank.slots if seat.adapter_id == BASE else self._slot_of(seat.adapter_id)

    def slots_of(self, rows: NDArray[np.integer]) -> Numbers | None:
        """The slot of each of these rows; None if all are the base model's."""
        slots = self._slot_of_row[rows]
        if bool((slots == self.bank.slots).all()):
            return None
        assert slots.min() >= 0, "a step uses an adapter that is in no slot"
        return slots

    @property
    def has_head(self) -> bool:
        """May an adapter have factors of the head, or a head of its own?"""
        return self.bank.embed_head is not None and self.bank.embed_head.has_head

    def batch_of(self, rows: NDArray[np.integer]) -> LoraBatch | None:
        """The batch of one token of each of these rows, for the head; None if their adapters have nothing there."""
        slots = self.slots_of(rows) if self.has_head else None
        return None if slots is None else make_batch(slots, self.bank.slots, self.bank.device)

    def launch(self, plan: StepPlan) -> None:
        """A step is submitted; behind `accept`.

        It waits, on the device, for copies into the slots that it uses; a CPU waits here.
        """
        slots = self._slot_of_row[[*plan.decodes, *(chunk.row for chunk in plan.chunks)]]
        self._flying_slots.append(slots)
        if not self._pending:
            return
        for slot in self._pending.keys() & set(slots.tolist()):
            pending = self._pending[slot]
            pending.wait()
            if not pending.has_failed:
                # Later steps are behind this one on the same stream.
                del self._pending[slot]

    def note_landing(self) -> None:
        """The oldest step that was submitted is over."""
        self._flying_slots.popleft()

    def lost(self, rows: Sequence[Row]) -> list[int]:
        """Positions of the rows whose adapter could not be copied into its slot; for steps that have waited."""
        slots = {slot for slot, pending in self._pending.items() if pending.has_failed}
        if not slots:
            return []
        return [at for at, row in enumerate(rows) if int(self._slot_of_row[row]) in slots]

    def project(self, projection: Projection, x: Tensor, layer: int, site: str, batch: LoraBatch) -> Output:
        """A matrix product at a site, plus what each token's adapter adds; it may be left open."""
        return self._project(projection, x, self._factors[layer][site], batch)

    def frame(self, tokens: int) -> BatchFrame:
        """The sizes of the adapter inputs of a step of `tokens` tokens."""
        return BatchFrame(tokens, self.bank.slots, tile_size_for(tokens))

    def _order(self, plan: StepPlan) -> None:
        loader = self._loader
        for adapter_id in plan.drops:
            loader.drop(adapter_id)
        for adapter in plan.fetches:
            loader.fetch(adapter)
        for adapter in plan.idle_fetches:
            loader.fetch(adapter, is_idle=True)
        if not plan.loads:
            return
        is_free: torch.cuda.Event | None = None
        if self.bank.device.type == "cuda":
            # Earlier steps may still read the slots' former residents. They may also read pages that belonged to other
            # slots; but no later step does: whoever had the pages has left its slot, and this plan's step is behind.
            is_free = torch.cuda.Event()
            is_free.record()
        for load in plan.loads:
            self._let_leave(load)
            self._loaded[load.slot] = load
            self._slot_of_row[self._adapter_of_row == load.adapter_id] = load.slot
            behind = is_free if self._may_be_read(load) else None
            self._pending[load.slot] = loader.load(load.adapter_id, load.slot, behind, load.pages, load.matrices)

    def _may_be_read(self, load: Load) -> bool:
        """Whether a step in flight may read what is overwritten; pages and matrices had residents in other slots."""
        return bool(_shared(load)) or any(bool((slots == load.slot).any()) for slots in self._flying_slots)

    def _let_leave(self, load: Load) -> None:
        """Whoever had the slot, a page or a matrix is in no slot; nor is the adapter in its own former slot.

        The next adapter in a slot must not take over its former resident's rows.
        """
        for slot, former in list(self._loaded.items()):
            is_shared = not _shared(load).isdisjoint(_shared(former))
            if slot == load.slot or former.adapter_id == load.adapter_id or is_shared:
                del self._loaded[slot]
                self._slot_of_row[self._adapter_of_row == former.adapter_id] = NO_SLOT

    def _slot_of(self, adapter_id: AdapterId) -> int:
        return next((slot for slot, load in self._loaded.items() if load.adapter_id == adapter_id), NO_SLOT)


def _shared(load: Load) -> frozenset[tuple[str, int]]:
    """What a load takes of what the slots share."""
    return frozenset((*(("page", page) for page in load.pages), *(("matrix", place) for place in load.matrices)))
