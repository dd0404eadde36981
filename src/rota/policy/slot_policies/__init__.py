"""The table of slot policies: a policy is a file of this folder and an entry here, and no policy knows another."""

from __future__ import annotations

from collections.abc import Callable

from rota.core.capacity import Capacity
from rota.core.errors import ConfigError
from rota.core.policy_config import PolicyConfig
from rota.policy.slot_policies.drain import Drain
from rota.policy.slot_policies.rotate import Rotate
from rota.policy.slot_policies.wait import Wait
from rota.policy.slot_policy import SlotPolicy

MakeSlotPolicy = Callable[[PolicyConfig, Capacity], SlotPolicy]

# By the name that --lora-policy takes. Other packages may add their own.
SLOT_POLICIES: dict[str, MakeSlotPolicy] = {
    "rotate": Rotate.from_config,
    "drain": Drain.from_config,
    "wait": Wait.from_config,
}


# The fields of PolicyConfig that each of them reads: a flag that no chosen policy reads is refused.
READS: dict[str, tuple[str, ...]] = {
    "rotate": ("lora_rotation_quantum_ms", "lora_max_stall_ms"),
    "drain": ("lora_drain_wait_threshold",),
    "wait": (),
}


def make_slot_policy(config: PolicyConfig, capacity: Capacity) -> SlotPolicy:
    """The policy that was asked for; raises ConfigError if there is none of that name."""
    check_slot_policy(config.lora_policy)
    return SLOT_POLICIES[config.lora_policy](config, capacity)


def check_slot_policy(name: str, option: str = "lora_policy") -> None:
    """Raise ConfigError unless there is such a policy; `option` is where the name was given."""
    if name not in SLOT_POLICIES:
        raise ConfigError(f"{option}: '{name}' is not a policy; the policies are {', '.join(SLOT_POLICIES)}.")
