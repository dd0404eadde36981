"""A bank's size follows the flags, then the adapters at the start, then what the device has room for.

Slots are not made for adapters that may never come: a small bank lies below the model's matrices (annex.py), where it
costs a step least, and memory that no slot takes holds KV.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from rota.core.config import CacheConfig, FirstAdapters, LoraConfig
from rota.core.errors import ConfigError
from rota.engine.device import DeviceMemory
from rota.engine.kv_cache import CacheShape
from rota.engine.lora.files.ranks import UNKNOWN_RANK
from rota.engine.lora.pages import PAGE_RANK, pages_for

LOG = logging.getLogger("rota.engine")

MEBIBYTE = 1 << 20
DEFAULT_SHARE = 0.05
# Slots for a few adapters, and those that come later; Llama-8B has room for as many of rank 16 in its annexes.
FEW_SLOTS = 8
# Of the adapters at the start: how many may come later and find a slot.
LATER = 1 / 4
# Of the memory that weights leave: adapters get this much though KV is short.
SHARE_OF_LITTLE = 1 / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BankSize:
    """How many slots of which rank, and why; with pages, how many pages they share."""

    slots: int = 0
    rank: int = 0
    pages: int = 0
    slots_from: str = ""
    rank_from: str = ""

    @property
    def places(self) -> int:
        """How many places the bank has, each of `place_rank`: pages, or a place for each slot."""
        return self.pages or self.slots

    @property
    def place_rank(self) -> int:
        return PAGE_RANK if self.pages else self.rank


NO_BANK = BankSize()


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a slot takes, and what there is for slots."""

    slot_bytes: int
    more: int  # places besides the slots: a staging buffer is as large as a slot
    memory: DeviceMemory
    beside_kv: int  # bytes that slots may take so that KV for the running limit is left
    annexes: Callable[[int], tuple[str, ...]]  # the sites at which so many slots get an annex

    def holds(self, size: float) -> int:
        """How many slots fit into so many bytes."""
        return max(0, int(size // self.slot_bytes) - self.more)

    def takes(self, slots: int) -> int:
        return (slots + self.more) * self.slot_bytes


def bytes_beside_kv(cache: CacheConfig, shape: CacheShape, memory: DeviceMemory, fraction: float, tokens: int) -> int:
    """What adapters may take, so that the blocks that were asked for are left, or KV of so many tokens.

    `fraction` of the memory is for weights, adapters and KV together.
    """
    if cache.kv_blocks is not None:
        return memory.total - memory.taken - (cache.kv_blocks + 1) * shape.block_bytes
    left = int(fraction * memory.total) - memory.taken
    wanted = -(-tokens // shape.block_size) * shape.block_bytes
    return max(left - wanted, int(SHARE_OF_LITTLE * left))


def choose_rank(config: LoraConfig, first: FirstAdapters) -> tuple[int, str]:
    """The rank of every slot, and why."""
    if config.max_lora_rank != "auto":
        return config.max_lora_rank, "max_lora_rank"
    rank = pages_for(first.rank or UNKNOWN_RANK) * PAGE_RANK
    return rank, "the largest at the start" if first.count else "no adapter at the start"


def choose_slots(config: LoraConfig, rank: int, first: FirstAdapters, room: Room) -> tuple[int, str]:
    """How many slots of this rank there are, and why. Raises ConfigError if none fits, or fewer than were asked for."""
    if config.max_loras_per_batch != "auto":
        _check_fits(config.max_loras_per_batch, rank, room)
        return config.max_loras_per_batch, "max_loras_per_batch"
    share = config.lora_memory_share or DEFAULT_SHARE
    bounds = [
        (_held(share, rank, room), f"{share:g} of the memory"),
        (config.max_loaded_loras, "max_loaded_loras"),
    ]
    if first.count:
        bounds.append((useful_slots(first.count, room.annexes), _counted(first.count)))
    slots, why = min(bounds)
    if config.lora_memory_share is None and (left := max(1, room.holds(room.beside_kv))) < slots:
        LOG.info(
            "%d slots for adapters instead of %d (%s), so that memory is left for the KV of max_running_requests; "
            "lora_memory_share or max_loras_per_batch would set more.",
            left, slots, why,
        )  # fmt: skip
        return left, "what KV of max_running_requests leaves"
    return slots, why


def useful_slots(first: int, annexes: Callable[[int], tuple[str, ...]]) -> int:
    """A slot for each adapter at the start, and some for later ones, as long as no site loses its annex by that."""
    fewest = max(FEW_SLOTS, first)
    most = max(FEW_SLOTS, first + int(first * LATER))
    kept = annexes(fewest)
    return max(slots for slots in range(fewest, most + 1) if annexes(slots) == kept)


def _held(share: float, rank: int, room: Room) -> int:
    size = share * room.memory.total
    slots = room.holds(size)
    if slots < 1:
        raise ConfigError(
            f"No adapter fits: lora_memory_share {share:g} of the device's memory is {_mib(size)}, and an adapter of "
            f"rank {rank} takes {_mib(room.takes(1))}. Raise lora_memory_share, lower max_lora_rank, or set "
            "max_loras_per_batch."
        )
    return slots


def _check_fits(slots: int, rank: int, room: Room) -> None:
    free = room.memory.total - room.memory.taken
    if room.takes(slots) > free:
        raise ConfigError(
            f"max_loras_per_batch is {slots}, which take {_mib(room.takes(slots))} at rank {rank}, but only "
            f"{_mib(free)} of {_mib(room.memory.total)} are free; {room.holds(free)} would fit."
        )


def _counted(adapters: int) -> str:
    return "1 adapter at the start" if adapters == 1 else f"{adapters} adapters at the start"


def _mib(size: float) -> str:
    return f"{size / MEBIBYTE:.0f} MiB"
