"""The engine's adapters: carries out what plans say of them, and knows which slot each row's tokens go through."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rota.core.adapter import Adapter
from rota.core.ids import BASE, AdapterId, Slot
from rota.core.messages import Message
from rota.core.plan import StepPlan
from rota.engine.lora.bank import Bank
from rota.engine.lora.batch import BatchFrame, tile_size_for
from rota.engine.lora.host import HostAdapter
from rota.engine.lora.layout import SiteFactors
from rota.engine.lora.loader import AdapterLoader
from rota.engine.model.linear import Projection
from rota.engine.model.sites import SITES
from rota.engine.step.lora_batch import LoraBatch

Numbers = NDArray[np.int32]
# A projection of x, with what each token's adapter adds to it.
Project = Callable[[Projection, Tensor, SiteFactors, LoraBatch], Tensor]

# A row whose adapter is in no slot: it must not be in a step.
NOWHERE = -1


class Adapters:
    """Bank, loader, and the map from rows to slots."""

    def __init__(
        self, bank: Bank, read: Callable[[Adapter], HostAdapter], project: Project, rows: int, overlaps: bool
    ) -> None:
        self.bank = bank
        self._project = project
        self._factors = [{site: bank.factors(layer, site) for site in SITES} for layer in range(bank.layers)]
        self._post: Callable[[Message], None] | None = None
        self._loader = AdapterLoader(bank, read, self._tell, overlaps)
        self._tenant_of: dict[Slot, AdapterId] = {}
        self._adapter_of_row: NDArray[np.int64] = np.full(rows + 1, BASE)
        # Base rows, padding's among them, have the number one past the last slot.
        self._slot_of_row: Numbers = np.full(rows + 1, bank.slots, np.int32)

    def listen(self, post: Callable[[Message], None]) -> None:
        """Whoever listens last hears everything from then on."""
        self._post = post

    def close(self) -> None:
        """End the loader's threads; nothing may be ordered afterwards."""
        self._loader.close()

    def _tell(self, message: Message) -> None:
        assert self._post is not None, "somebody must listen before adapters are loaded"
        self._post(message)

    def accept(self, plan: StepPlan) -> None:
        """Start what the plan orders; nothing here waits, unless loading is not to overlap."""
        if plan.fetches or plan.loads or plan.drops:
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

    def project(self, projection: Projection, x: Tensor, layer: int, site: str, batch: LoraBatch) -> Tensor:
        """A matrix product at a site, and what each token's adapter adds to it."""
        return self._project(projection, x, self._factors[layer][site], batch)

    def frame(self, tokens: int) -> BatchFrame:
        """How a step of so many tokens takes its slots."""
        return BatchFrame(tokens, self.bank.slots, tile_size_for(tokens))

    def _order(self, plan: StepPlan) -> None:
        loader = self._loader
        for adapter_id in plan.drops:
            loader.drop(adapter_id)
        for adapter in plan.fetches:
            loader.fetch(adapter)
        if not plan.loads:
            return
        is_free: torch.cuda.Event | None = None
        if self.bank.device.type == "cuda":
            # Steps before this one may still read the slots' former tenants.
            is_free = torch.cuda.Event()
            is_free.record()
        for load in plan.loads:
            # Where it sat before is not its place any more: whoever is copied there next must not take its rows along.
            self._tenant_of = {slot: one for slot, one in self._tenant_of.items() if one != load.adapter_id}
            former = self._tenant_of.get(load.slot)
            if former is not None:
                self._slot_of_row[self._adapter_of_row == former] = NOWHERE
            self._tenant_of[load.slot] = load.adapter_id
            self._slot_of_row[self._adapter_of_row == load.adapter_id] = load.slot
            loader.load(load.adapter_id, load.slot, is_free)

    def _slot_of(self, adapter_id: AdapterId) -> int:
        for slot, tenant in self._tenant_of.items():
            if tenant == adapter_id:
                return slot
        return NOWHERE
