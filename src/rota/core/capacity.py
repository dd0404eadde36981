"""Capacity: what an engine turned out to have room for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What was found: how much the device can hold. It is never written back into the config."""

    blocks: int
    block_size: int
    rows: int
    max_sequence_tokens: int
    slots: int = 0  # adapters a step may hold
    adapter_bytes: int = 0  # what the slots take on the device, with a staging buffer if there is one
    slot_bytes: int = 0  # what one more slot would take there; 0: not known
    slot_rank: int = 0  # the largest rank that fits into a slot
    pages: int = 0  # that the slots share, as many for an adapter as its rank needs; 0: every slot holds any adapter
    matrices: int = 0  # places for an embedding or a head of an adapter's own, which the slots share
    slots_from: str = ""  # why there are so many slots
    rank_from: str = ""  # why they are so large
    fused_lora_a: tuple[str, ...] = ()  # sites where adapters' A lie below the model's matrices
    vocabulary: int | None = None  # token ids lie below it; None: any id may come
    # Behind this many tokens the attention of a prompt's token takes as long as all else of it; None: not known.
    deep_prefix: int | None = None
    # In a step full of prompts the device computes decodes in such steps; what they leave of one is padding.
    row_step: int = 1
    # What the device took when it was tried: a step of one decode, and each token of a prompt; 0: it was not tried, or
    # on a few tokens, which say nothing of many.
    decode_s: float = 0.0
    token_s: float = 0.0
    window: int | None = None  # tokens that the layer with the longest view sees, its own included; None: all of them
    ranks: int = 1  # devices that share the model
    device: str | None = None  # "cuda" or "cpu"; None: not known
    kv_dtype: str | None = None  # of keys and values; None: not known
    dtype: str | None = None  # in which the model computes; None: not known
