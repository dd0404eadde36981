"""A slot policy from outside the package: the adapter asked last takes the slot of the one that has sat longest."""

from __future__ import annotations

from typing import Self

from rota.core.capacity import Capacity
from rota.core.policy_config import PolicyConfig
from rota.policy.slot_policy import SlotPolicy, Turn
from rota.policy.views import AdapterView, SlotsView


class NewestFirst(SlotPolicy):
    """One file, and one entry in the table."""

    def __init__(self, quantum_s: float) -> None:
        self._quantum_s = quantum_s

    @classmethod
    def from_config(cls, config: PolicyConfig, capacity: Capacity) -> Self:
        return cls((config.lora_rotation_quantum_ms or 1000.0) / 1000)

    def due_at(self, view: AdapterView) -> float:
        return -view.oldest_at if view.waiting else view.ran_at

    def turns(self, slots: SlotsView, now: float) -> list[Turn]:
        over = [resident for resident in slots.residents if now >= resident.slot_since + self._quantum_s]
        leaving = sorted((one for one in over if slots.may_leave(one.adapter_id)), key=lambda one: one.slot_since)
        pairs = zip(leaving, slots.claimants(), strict=False)
        return [Turn(resident.adapter_id, claimant.adapter_id) for resident, claimant in pairs]

    def ask_again_at(self, slots: SlotsView, now: float) -> float:
        return now + self._quantum_s
