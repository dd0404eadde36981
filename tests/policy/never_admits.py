"""A slot policy that is wrong: it gives slots to adapters and lets none of their requests start."""

from __future__ import annotations

from typing import Self

from rota.core.capacity import Capacity
from rota.core.ids import BASE
from rota.core.policy_config import PolicyConfig
from rota.policy.slot_policy import SlotPolicy
from rota.policy.views import AdapterView

NEVER = PolicyConfig(lora_policy="never-admits")


class NeverAdmits(SlotPolicy):
    @classmethod
    def from_config(cls, config: PolicyConfig, capacity: Capacity) -> Self:
        return cls()

    def admits(self, view: AdapterView, steps_needed: int) -> bool:
        return view.adapter_id == BASE
