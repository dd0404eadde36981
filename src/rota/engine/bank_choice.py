"""All ranks of an engine agree on one bank: rank 0 knows the adapters at the start, and the least memory decides."""

from __future__ import annotations

import sys
from functools import partial

from rota.core.config import EngineConfig, FirstAdapters
from rota.engine.choices import Choices
from rota.engine.kv_cache import DEFAULT_FRACTION, SENSIBLE_TOKENS, CacheShape
from rota.engine.lora.bank import pays_staging, slot_bytes
from rota.engine.lora.bank_size import (
    BankSize,
    Room,
    bytes_beside_kv,
    choose_pages,
    choose_rank,
    choose_slots,
    has_pages,
    slots_over,
)
from rota.engine.lora.pages import PAGE_RANK, pages_for
from rota.engine.parallel.group import Group


def choose_bank(config: EngineConfig, chosen: Choices, shape: CacheShape, group: Group) -> BankSize:
    """The bank of every rank; waits for all ranks. Raises ConfigError if it does not fit."""
    first = _of_rank_0(config.first, group)
    rank, rank_from = choose_rank(config.lora, first)
    pages = 0
    if has_pages(config.lora, first):
        room = _room(config, chosen, shape, PAGE_RANK, pages_for(rank))
        pages, pages_from = choose_pages(config.lora, rank, first, room)
        slots, slots_from = slots_over(pages, pages_from, config.lora, first)
    else:
        slots, slots_from = choose_slots(config.lora, rank, first, _room(config, chosen, shape, rank))
    least, least_pages = group.least(slots), group.least(pages)
    slots_from = slots_from if (least, least_pages) == (slots, pages) else "the memory of another rank"
    return BankSize(slots=least, rank=rank, pages=least_pages, slots_from=slots_from, rank_from=rank_from)


def _of_rank_0(first: FirstAdapters, group: Group) -> FirstAdapters:
    """Only rank 0 loads the adapters to start with: under torchrun the others may have been told of none."""
    told = first if group.rank == 0 else FirstAdapters(sys.maxsize, sys.maxsize, sys.maxsize)
    return FirstAdapters(group.least(told.count), group.least(told.rank), group.least(told.pages))


def _room(config: EngineConfig, chosen: Choices, shape: CacheShape, rank: int, stage: int = 1) -> Room:
    """For places of this rank; a staging buffer is as large as `stage` of them."""
    spec, dtype, device, memory = chosen.spec, chosen.dtype, chosen.device, chosen.memory
    fraction = config.cache.mem_fraction_static or DEFAULT_FRACTION[device.type]
    tokens = config.scheduler.max_running_requests * min(spec.context_length, SENSIBLE_TOKENS)
    return Room(
        place_bytes=slot_bytes(spec, rank, dtype),
        more=stage if pays_staging(spec, rank, dtype, device) else 0,
        memory=memory,
        beside_kv=bytes_beside_kv(config.cache, shape, memory, fraction, tokens),
        annexes=partial(chosen.annexes, rank=rank),
    )
