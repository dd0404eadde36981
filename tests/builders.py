"""Builders give defaults, so that a test names only what it is about."""

from __future__ import annotations

import random
from typing import Any

from rota.core.adapter import Adapter
from rota.core.capacity import Capacity
from rota.core.ids import BASE, AdapterId, RequestId
from rota.core.messages import Abort, AddAdapter
from rota.core.request import Pooling, Request, SamplingParams
from rota.core.tenant import SOLE_TENANT, Tenant

# Prompts stay below it, so that a tiny model with this vocabulary can run them.
VOCABULARY = 256


def request(
    id: str = "r0",
    prompt: int | tuple[int, ...] = 3,
    max_new_tokens: int = 4,
    arrived_at: float = 0.0,
    adapter: AdapterId = BASE,
    tenant: Tenant | str = SOLE_TENANT,
    cache_scope: str = "",
    priority: int = 0,
    pooling: Pooling | None = None,
    **sampling: Any,
) -> Request:
    """A greedy request; a number as prompt means that many tokens, different for every id."""
    if isinstance(prompt, int):
        dice = random.Random(id)
        prompt = tuple(dice.randrange(3, VOCABULARY) for _ in range(prompt))
    fields = {"temperature": 0.0, **sampling, "max_new_tokens": max_new_tokens}
    return Request(
        request_id=RequestId(id),
        prompt=prompt,
        sampling=SamplingParams.from_fields(fields),
        arrived_at=arrived_at,
        adapter_id=adapter,
        tenant=Tenant(name=tenant) if isinstance(tenant, str) else tenant,
        cache_scope=cache_scope,
        priority=priority,
        pooling=pooling,
    )


def submit(id: str = "r0", **fields: Any) -> Request:
    return request(id, **fields)


def abort(id: str = "r0", at: float = 0.0) -> Abort:
    return Abort(RequestId(id), at)


def add_adapter(number: int, at: float = 0.0, **fields: Any) -> AddAdapter:
    named = {"name": f"adapter{number}", "path": f"adapters/{number}", **fields}
    return AddAdapter(adapter=Adapter(adapter_id=AdapterId(number), **named), at=at)


def capacity(
    blocks: int = 64,
    block_size: int = 16,
    rows: int = 8,
    max_sequence_tokens: int = 512,
    slots: int = 2,
    vocabulary: int | None = None,
    window: int | None = None,
    adapter_bytes: int = 2_000_000,
    deep_prefix: int | None = None,
    row_step: int = 1,
    kv_dtype: str | None = "bfloat16",
    pages: int = 0,
    matrices: int = 0,
    device: str | None = None,
    decode_s: float = 0.0,
    token_s: float = 0.0,
) -> Capacity:
    return Capacity(
        blocks=blocks,
        block_size=block_size,
        rows=rows,
        max_sequence_tokens=max_sequence_tokens,
        slots=slots,
        vocabulary=vocabulary,
        window=window,
        adapter_bytes=adapter_bytes,
        deep_prefix=deep_prefix,
        row_step=row_step,
        slot_rank=16,
        slots_from="6 adapters at the start",
        rank_from="the largest at the start",
        kv_dtype=kv_dtype,
        pages=pages,
        matrices=matrices,
        device=device,
        decode_s=decode_s,
        token_s=token_s,
    )
