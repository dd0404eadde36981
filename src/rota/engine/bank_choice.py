"""All ranks of an engine agree on one bank: rank 0 knows the adapters at the start, and the least memory decides."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from functools import partial

from rota.core.adapter import Extra
from rota.core.config import EngineConfig, FirstAdapters
from rota.engine.choices import Choices
from rota.engine.kv_cache import DEFAULT_FRACTION, SENSIBLE_TOKENS, CacheShape
from rota.engine.lora.bank import pays_staging, slot_bytes
from rota.engine.lora.bank_size import (
    BankSize,
    Room,
    bytes_beside_kv,
    choose_matrices,
    choose_pages,
    choose_rank,
    choose_slots,
    has_pages,
    slots_over,
    useful_slots,
)
from rota.engine.lora.copies import can_batch
from rota.engine.lora.embed_head import end_bytes, matrix_bytes
from rota.engine.lora.files.ranks import PAGE_RANK, pages_for
from rota.engine.lora.packing import unturned_bytes
from rota.engine.lora.trims import trim_bytes
from rota.engine.model.sites import site_shapes
from rota.engine.parallel.group import Group


def choose_bank(config: EngineConfig, chosen: Choices, shape: CacheShape, group: Group) -> BankSize:
    """The bank of every rank; waits for all ranks. Raises ConfigError if it does not fit."""
    assert config.first is not None, "the engine waited for it before it was built"
    first = _of_rank_0(config.first, group)
    rank, rank_from = choose_rank(config.lora, first)
    pages, extras = 0, Extra(first.extras)
    matrix = matrix_bytes(chosen.spec, chosen.dtype)
    matrices = group.least(choose_matrices(config.lora, first, matrix, _room(config, chosen, shape, rank)))
    apart_bytes = matrices * matrix
    if unpacks(chosen):
        apart_bytes += unturned_bytes(chosen.spec, rank, chosen.dtype)
    if has_pages(config.lora, first):
        room = _room(config, chosen, shape, PAGE_RANK, pages_for(rank))
        trims = extra_bytes(chosen, extras, rank) * useful_slots(first.count, lambda _: ())
        room = replace(room, apart=trims + apart_bytes)
        pages, pages_from = choose_pages(config.lora, rank, first, room)
        slots, slots_from = slots_over(pages, pages_from, config.lora, first)
    else:
        room = _room(config, chosen, shape, rank)
        place_bytes = room.place_bytes + extra_bytes(chosen, extras, rank)
        room = replace(room, place_bytes=place_bytes, apart=apart_bytes)
        slots, slots_from = choose_slots(config.lora, rank, first, room)
    least, least_pages = group.least(slots), group.least(pages)
    slots_from = slots_from if (least, least_pages) == (slots, pages) else "the memory of another rank"
    return BankSize(
        slots=least,
        rank=rank,
        pages=least_pages,
        extras=extras,
        matrices=matrices,
        slots_from=slots_from,
        rank_from=rank_from,
    )


def _of_rank_0(first: FirstAdapters, group: Group) -> FirstAdapters:
    """Only rank 0 loads the adapters to start with: under torchrun the others may have been told of none."""
    told = {name: number if group.rank == 0 else sys.maxsize for name, number in asdict(first).items()}
    return FirstAdapters(**{name: group.least(number) for name, number in told.items()})


def unpacks(chosen: Choices) -> bool:
    """Do adapters stay packed in host memory? A rank of several reads parts of factors."""
    return can_batch(chosen.device) and chosen.shard.size == 1


def extra_bytes(chosen: Choices, extras: Extra, rank: int) -> int:
    """What one slot of this rank takes besides factors in the layers."""
    spec, tokens = chosen.spec, chosen.shard.tokens(chosen.whole.vocab_size)
    trims = trim_bytes(site_shapes(spec), spec.layers) if Extra.TRIMS in extras else 0
    return trims + end_bytes(spec, tokens.end - tokens.first, rank, chosen.dtype, extras)


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
