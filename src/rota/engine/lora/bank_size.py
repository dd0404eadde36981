"""A bank's size follows the flags, then the adapters at the start, then what the device has room for.

Slots are not made for adapters that may never come: a small bank lies below the model's matrices (layout.py), where it
costs a step least, and memory that no slot takes holds KV. Where the adapters at the start differ in rank, and no flag
says how large slots are, the slots share pages (files/ranks.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from rota.core.adapter import Extra
from rota.core.config import CacheConfig, FirstAdapters, LoraConfig
from rota.core.errors import ConfigError
from rota.engine.device import DeviceMemory
from rota.engine.kv_cache import CacheShape
from rota.engine.lora.files.ranks import PAGE_RANK, UNKNOWN_RANK, pages_for

LOG = logging.getLogger("rota.engine")

MEBIBYTE = 1 << 20
DEFAULT_SHARE = 0.05
# Slots for a few adapters, and those that come later; Llama-8B has room for as many of rank 16 in its fused LoRA A.
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
    extras: Extra = Extra.NONE
    matrices: int = 0  # places for an embedding or a head of an adapter's own
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
class BankRoom:
    """What a place takes (a slot's own, or a page), and what there is for places."""

    place_bytes: int
    apart: int = 0  # bytes besides places: matrices, gains and biases of slots that share pages, and where B is turned
    more: int  # places besides those of slots: a staging buffer is as large as the largest adapter
    memory: DeviceMemory
    beside_kv: int  # bytes that adapters may take so that KV for the running limit is left
    sites_to_fuse: Callable[[int], tuple[str, ...]]  # the sites at which so many places get a fused LoRA A

    def holds(self, size: float) -> int:
        """How many places fit into so many bytes."""
        return max(0, int((size - self.apart) // self.place_bytes) - self.more)

    def takes(self, places: int) -> int:
        return (places + self.more) * self.place_bytes + self.apart


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


def choose_slots(config: LoraConfig, rank: int, first: FirstAdapters, room: BankRoom) -> tuple[int, str]:
    """How many slots of this rank there are, and why. Raises ConfigError if none fits, or fewer than were asked for."""
    if config.max_loras_per_batch != "auto":
        _check_fits(config.max_loras_per_batch, rank, room)
        return config.max_loras_per_batch, "max_loras_per_batch"
    bounds = [_held(config, rank, room), (config.max_loaded_loras, "max_loaded_loras")]
    if first.count:
        bounds.append((useful_slots(first.count, room.sites_to_fuse), _counted(first.count)))
    return _beside_kv(config, room, min(bounds))


def choose_matrices(config: LoraConfig, first: FirstAdapters, size: int, room: BankRoom) -> int:
    """How many places of this size there are for matrices of adapters' own: as many as fit of those at the start.

    They take half of what adapters may take, at most; the slots have the other half.
    """
    most = (config.lora_memory_share or DEFAULT_SHARE) * room.memory.total
    if config.lora_memory_share is None:
        most = min(most, room.beside_kv)
    return min(first.matrices, max(0, int(most / 2 // size)))


def has_pages(config: LoraConfig, first: FirstAdapters) -> bool:
    """Do slots share pages? If the adapters at the start differ in rank, and no flag asks for slots of one rank."""
    is_free = config.max_lora_rank == config.max_loras_per_batch == "auto"
    return is_free and 0 < first.pages < first.count * pages_for(first.rank)


def choose_pages(config: LoraConfig, rank: int, first: FirstAdapters, room: BankRoom) -> tuple[int, str]:
    """How many pages slots of at most this rank share, and why. Raises ConfigError if one of this rank does not fit."""
    largest = pages_for(rank)
    bounds = [_held(config, rank, room, largest), (useful_pages(first, room.sites_to_fuse), _counted(first.count))]
    return _beside_kv(config, room, min(bounds), largest, "pages")


def slots_over(pages: int, pages_from: str, config: LoraConfig, first: FirstAdapters) -> tuple[int, str]:
    """How many slots share so many pages, and why: few numbers in a table, so none is saved for a fused LoRA A."""
    wanted = min(pages, useful_slots(first.count, lambda _: ()))
    return min((wanted, pages_from), (config.max_loaded_loras, "max_loaded_loras"))


def useful_pages(first: FirstAdapters, sites_to_fuse: Callable[[int], tuple[str, ...]]) -> int:
    """Pages for every adapter at the start, and some for later ones, as long as no site loses its fused LoRA A by that.

    A later adapter may be as large as the largest; at least it fits beside a few small ones.
    """
    largest = pages_for(first.rank)
    fewest = max(first.pages, largest + FEW_SLOTS)
    most = max(fewest, first.pages + max(largest, int(first.pages * LATER)))
    kept = sites_to_fuse(fewest)
    return max(pages for pages in range(fewest, most + 1) if sites_to_fuse(pages) == kept)


def useful_slots(first: int, sites_to_fuse: Callable[[int], tuple[str, ...]]) -> int:
    """A slot for each adapter at the start, and some for later ones, as long as no site loses its fused LoRA A."""
    fewest = max(FEW_SLOTS, first)
    most = max(FEW_SLOTS, first + int(first * LATER))
    kept = sites_to_fuse(fewest)
    return max(slots for slots in range(fewest, most + 1) if sites_to_fuse(slots) == kept)


def _held(config: LoraConfig, rank: int, room: BankRoom, least: int = 1) -> tuple[int, str]:
    """The places in the share of the memory; an adapter of this rank needs the least."""
    share = config.lora_memory_share or DEFAULT_SHARE
    size = share * room.memory.total
    places = room.holds(size)
    if places < least:
        raise ConfigError(
            f"No adapter fits: lora_memory_share {share:g} of the device's memory is {_mib(size)}, and an adapter of "
            f"rank {rank} takes {_mib(room.takes(least))}. Raise lora_memory_share, lower max_lora_rank, or set "
            "max_loras_per_batch."
        )
    return places, f"{share:g} of the memory"


def _beside_kv(
    config: LoraConfig, room: BankRoom, bound: tuple[int, str], least: int = 1, what: str = "slots"
) -> tuple[int, str]:
    """The bound, or less if the share is the default and KV of the running limit would not be left."""
    places, why = bound
    if config.lora_memory_share is not None or (left := max(least, room.holds(room.beside_kv))) >= places:
        return bound
    LOG.info(
        "%d %s for adapters instead of %d (%s), so that memory is left for the KV of max_running_requests; %s would "
        "set more.",
        left, what, places, why, "lora_memory_share or max_loras_per_batch" if what == "slots" else "lora_memory_share",
    )  # fmt: skip
    return left, "what KV of max_running_requests leaves"


def _check_fits(slots: int, rank: int, room: BankRoom) -> None:
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
