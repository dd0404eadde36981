"""A bank is as large as asked, or as the adapters at the start need it, and never larger than memory allows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rota.core.config import CacheConfig, FirstAdapters, LoraConfig
from rota.core.errors import ConfigError
from rota.core.lora_paths import LoraPath
from rota.engine.device import DeviceMemory
from rota.engine.kv_cache import CacheShape
from rota.engine.lora.bank import slot_bytes
from rota.engine.lora.bank_size import (
    BankRoom,
    bytes_beside_kv,
    choose_pages,
    choose_rank,
    choose_slots,
    has_pages,
    slots_over,
    useful_pages,
    useful_slots,
)
from rota.engine.lora.files.brought import Brought
from rota.engine.lora.files.ranks import PAGE_RANK, UNKNOWN_RANK, needs_of, pages_for
from rota.engine.lora.layout import fused_sites
from rota.engine.model.sites import SITES
from tests.engine.lora.small_bank import LLAMA_8B

GIBIBYTE = 1 << 30
H200 = DeviceMemory(140 * GIBIBYTE, 16 * GIBIBYTE)
SMALL_GPU = DeviceMemory(24 * GIBIBYTE, 16 * GIBIBYTE)
ROWS = 256
LLAMA_KV = CacheShape(LLAMA_8B.layers, LLAMA_8B.kv_heads, LLAMA_8B.head_dim, 16, torch.bfloat16)


def nothing_fused(_: int) -> tuple[str, ...]:
    return ()


def sites_of(rank: int) -> Callable[[int], tuple[str, ...]]:
    return partial(fused_sites, LLAMA_8B, rank=rank, dtype=torch.bfloat16)


def room_for(rank: int, memory: DeviceMemory, rows: int = ROWS, more: int = 0) -> BankRoom:
    """Llama-8B's in bf16, with Triton's kernels."""
    return BankRoom(
        place_bytes=slot_bytes(LLAMA_8B, rank, torch.bfloat16),
        more=more,
        memory=memory,
        beside_kv=bytes_beside_kv(CacheConfig(), LLAMA_KV, memory, 0.88, 512 * rows),
        sites_to_fuse=sites_of(rank),
    )


def bank(ranks: list[int], memory: DeviceMemory = H200, rows: int = ROWS, **fields: Any) -> tuple[int, int]:
    """Slots and rank of a server that starts with adapters of these ranks and has no pages."""
    config, first = LoraConfig(**fields), first_of(ranks)
    rank, _ = choose_rank(config, first)
    assert not has_pages(config, first)
    return choose_slots(config, rank, first, room_for(rank, memory, rows))[0], rank


def first_of(ranks: list[int]) -> FirstAdapters:
    return FirstAdapters(count=len(ranks), rank=max(ranks, default=0), pages=sum(map(pages_for, ranks)))


def paged(
    ranks: list[int], memory: DeviceMemory = H200, rows: int = ROWS, more: int = 0, **fields: Any
) -> tuple[int, int, str]:
    """Slots, pages and what decided, for a server that starts with adapters of these ranks."""
    config, first = LoraConfig(**fields), first_of(ranks)
    rank, _ = choose_rank(config, first)
    assert has_pages(config, first)
    pages, why = choose_pages(config, rank, first, room_for(PAGE_RANK, memory, rows, more))
    slots, slots_from = slots_over(pages, why, config, first)
    return slots, pages, slots_from


@pytest.mark.parametrize(
    ("ranks", "slots", "rank"),
    [
        ([16] * 6, 8, 16),  # the best that can be set by hand: all A below the model's matrices
        ([16] * 3 + [9] * 3, 8, 16),  # two pages each: one rank for all
        ([8] * 6, 8, 8),
        ([12] * 6, 8, 16),
        ([1], 8, 8),
        ([16] * 8, 9, 16),  # one more, and no site loses its fused LoRA A
        ([16] * 16, 16, 16),  # none more, or gate_up would lose its fused LoRA A
        ([16] * 64, 80, 16),
        ([16] * 200, 89, 16),  # 5 % of the memory
        ([64] * 16, 20, 64),
        ([], 22, 64),  # nobody knows who comes
    ],
)
def test_by_default_slots_follow_the_adapters_at_the_start(ranks, slots, rank):
    assert bank(ranks) == (slots, rank)


@pytest.mark.parametrize(
    ("ranks", "slots", "pages"),
    [
        ([8] * 100 + [64] * 4, 128, 165),  # each of them and a quarter more, within max_loaded_loras
        ([8] * 5 + [64], 8, 18),  # room for a later one of rank 64 would cost a fused LoRA A
        ([8, 16], 8, 10),
        ([4] + [20] * 2 + [64], 8, 18),
        ([64] + [8] * 2, 8, 18),
        ([64] * 30 + [8], 38, 179),  # 5 % of the memory
    ],
)
def test_adapters_of_different_ranks_share_pages(ranks, slots, pages):
    assert paged(ranks)[:2] == (slots, pages)


def test_five_adapters_of_rank_8_and_one_of_rank_64_lie_below_every_matrix():
    assert sites_of(PAGE_RANK)(paged([8] * 5 + [64])[1]) == SITES
    assert sites_of(64)(6) == ("o",)  # uniform slots


def test_pages_say_what_decided(caplog):
    caplog.set_level(logging.INFO)
    mixed = [8] * 100 + [64] * 4
    assert paged(mixed)[2] == "max_loaded_loras"
    assert paged(mixed[10:])[2] == "94 adapters at the start"
    assert paged(mixed, lora_memory_share=0.01) == (35, 35, "0.01 of the memory")
    assert paged(mixed, max_loaded_loras=20) == (20, 165, "max_loaded_loras")
    assert paged(mixed, SMALL_GPU) == (16, 16, "what KV of max_running_requests leaves")
    assert caplog.messages[-1].startswith("16 pages for adapters instead of 30 (0.05 of the memory), so that memory")
    assert caplog.messages[-1].endswith("; lora_memory_share would set more.")
    assert paged(mixed, more=8, lora_memory_share=0.01)[1] == 27  # a staging buffer is as large as the largest


def test_a_share_that_does_not_hold_the_largest_adapter_is_refused():
    with pytest.raises(ConfigError, match=r"is 287 MiB, and an adapter of rank 64 takes 320 MiB"):
        paged([8, 64], lora_memory_share=0.002)


@pytest.mark.parametrize("fields", [{"max_lora_rank": 64}, {"max_loras_per_batch": 4}])
def test_a_flag_asks_for_slots_of_one_rank(fields):
    assert not has_pages(LoraConfig(**fields), first_of([8, 64]))
    assert has_pages(LoraConfig(), first_of([8, 64]))
    assert not has_pages(LoraConfig(), FirstAdapters())


@given(st.lists(st.integers(1, 128), min_size=1, max_size=60), st.booleans())
def test_useful_pages_hold_every_adapter_and_cost_no_annex(ranks, may_fuse):
    first, sites_to_fuse = first_of(ranks), sites_of(PAGE_RANK) if may_fuse else nothing_fused
    useful, largest = useful_pages(first, sites_to_fuse), pages_for(max(ranks))
    assert useful >= max(first.pages, largest + 8)
    assert sites_to_fuse(useful) == sites_to_fuse(max(first.pages, largest + 8))
    assert may_fuse or useful >= first.pages + largest


def test_with_six_adapters_of_rank_16_the_defaults_are_the_best_flags():
    assert bank([16] * 6) == bank([16] * 6, max_loras_per_batch=8, max_lora_rank=16) == (8, 16)
    assert sites_of(16)(8) == SITES


@pytest.mark.parametrize(
    ("fields", "slots", "rank"),
    [
        ({"max_lora_rank": 64}, 8, 64),
        ({"max_lora_rank": 5}, 8, 5),
        ({"max_loras_per_batch": 3}, 3, 16),
        ({"max_loras_per_batch": 40, "max_lora_rank": 32}, 40, 32),
        ({"max_loaded_loras": 7}, 7, 16),
        ({"lora_memory_share": 0.002}, 3, 16),
    ],
)
def test_a_flag_goes_before_the_adapters_at_the_start(fields, slots, rank):
    assert bank([16] * 6, **fields) == (slots, rank)


def test_slots_leave_kv_for_the_running_limit_unless_a_share_is_set(caplog):
    caplog.set_level(logging.INFO)
    assert bank([16] * 40, SMALL_GPU, rows=8) == (15, 16)  # 5 % of the memory
    assert not caplog.records
    # Of the 5 GiB beside the weights 256 requests would need 16 for their KV: slots get an eighth.
    assert bank([16] * 40, SMALL_GPU) == (8, 16)
    assert bank([16] * 40, SMALL_GPU, lora_memory_share=0.05) == (15, 16)
    assert [record.getMessage() for record in caplog.records] == [
        "8 slots for adapters instead of 15 (0.05 of the memory), so that memory is left for the KV of "
        "max_running_requests; lora_memory_share or max_loras_per_batch would set more."
    ]


def test_slots_leave_the_blocks_that_were_asked_for():
    asked = CacheConfig(kv_blocks=1000)
    assert bytes_beside_kv(asked, LLAMA_KV, SMALL_GPU, 0.88, 1) == 8 * GIBIBYTE - 1001 * LLAMA_KV.block_bytes
    assert bytes_beside_kv(CacheConfig(kv_blocks=10_000), LLAMA_KV, SMALL_GPU, 0.88, 1) < 0


def test_a_choice_says_what_decided():
    def why(count: int, memory: DeviceMemory = H200, **fields: Any) -> tuple[str, str]:
        config, first = LoraConfig(**fields), FirstAdapters(count=count, rank=16 if count else 0)
        rank, rank_from = choose_rank(config, first)
        return choose_slots(config, rank, first, room_for(rank, memory))[1], rank_from

    assert why(6) == ("6 adapters at the start", "the largest at the start")
    assert why(1)[0] == "1 adapter at the start"
    assert why(200) == ("0.05 of the memory", "the largest at the start")
    assert why(0) == ("0.05 of the memory", "no adapter at the start")
    assert why(20, max_loaded_loras=4)[0] == "max_loaded_loras"
    assert why(40, SMALL_GPU)[0] == "what KV of max_running_requests leaves"
    assert why(6, max_loras_per_batch=2, max_lora_rank=32) == ("max_loras_per_batch", "max_lora_rank")


def test_where_copies_need_a_staging_buffer_the_memory_share_holds_it_too():
    config, first = LoraConfig(), FirstAdapters(count=200, rank=16)
    assert choose_slots(config, 16, first, room_for(16, H200, more=1))[0] == 88


def test_slots_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"No adapter fits: lora_memory_share 0\.001 of the device's memory is 143 "):
        bank([32] * 6, lora_memory_share=0.001)
    with pytest.raises(
        ConfigError, match=r"max_loras_per_batch is 40, .* at rank 64, but only 8192 MiB of .* 25 would"
    ):
        bank([64] * 6, SMALL_GPU, max_loras_per_batch=40)


Memories = st.builds(
    lambda total, taken: DeviceMemory(total, int(taken * total)),
    st.integers(8 * GIBIBYTE, 200 * GIBIBYTE),
    st.floats(0.0, 1.0),
)
Ranks = st.sampled_from([8, 16, 24, 64])
Counts = st.integers(0, 300)


@given(Counts, Ranks, Memories, st.floats(0.04, 0.9), st.integers(1, 200), st.integers(1, 512))
def test_slots_stay_within_every_bound(count, rank, memory, share, loaded, rows):
    first, room = FirstAdapters(count=count, rank=rank), room_for(rank, memory, rows)
    slots, _ = choose_slots(LoraConfig(lora_memory_share=share, max_loaded_loras=loaded), rank, first, room)
    assert 1 <= slots <= loaded
    assert room.takes(slots) <= share * memory.total
    default, _ = choose_slots(LoraConfig(max_loaded_loras=loaded), rank, first, room)
    assert 1 <= default <= loaded
    assert default == 1 or room.takes(default) <= min(0.05 * memory.total, room.beside_kv)


@given(st.integers(1, 300), st.integers(0, 50), Ranks, Memories, st.integers(0, 50 * GIBIBYTE))
def test_more_adapters_or_more_memory_never_mean_fewer_slots(count, more, rank, memory, more_memory):
    def slots(count: int, total: int) -> int:
        room = room_for(rank, DeviceMemory(total, memory.taken))
        return choose_slots(LoraConfig(), rank, FirstAdapters(count=count, rank=rank), room)[0]

    few = slots(count, memory.total)
    assert slots(count + more, memory.total) >= few
    assert slots(count, memory.total + more_memory) >= few


@given(st.integers(1, 300), Ranks)
def test_useful_slots_hold_every_adapter_and_cost_no_annex(count, rank):
    useful = useful_slots(count, sites_of(rank))
    assert max(8, count) <= useful <= max(8, count + count // 4) == useful_slots(count, nothing_fused)
    assert sites_of(rank)(useful) == sites_of(rank)(max(8, count))


@pytest.mark.parametrize(
    ("config", "rank"),
    [
        ('{"r": 16}', 16),
        ("{}", 8),  # PEFT's own default
        ('{"r": 8, "rank_pattern": {"q_proj": 2, "down_proj": 40}}', 40),
        ('{"r": 0}', UNKNOWN_RANK),
        ('{"r": 8, "rank_pattern": {"q_proj": "many"}}', UNKNOWN_RANK),
        ("{", UNKNOWN_RANK),
        ("[8]", UNKNOWN_RANK),
        (f'{{"r": 8, "notes": "{"long " * 8000}", "rank_pattern": {{"q_proj": 40}}}}', 40),
        (None, UNKNOWN_RANK),
    ],
)
def test_the_rank_of_a_folder_is_read_from_its_config_alone(tmp_path, config, rank):
    if config is not None:
        (tmp_path / "adapter_config.json").write_text(config)
    [needs] = needs_of([LoraPath(name="a", path=str(tmp_path))], Brought())
    assert needs.rank == rank


def test_each_folder_has_its_rank_and_relative_paths_start_at_the_root(tmp_path: Path):
    for name, rank in (("small", 4), ("large", 128)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(f'{{"r": {rank}}}')
    entries = [LoraPath(name=name, path=name) for name in ("small", "large")]
    assert [one.rank for one in needs_of(entries, Brought(str(tmp_path)))] == [4, 128]
    builtin = LoraPath(name="a", path=str(tmp_path / "small"), is_builtin=True)
    assert [one.rank for one in needs_of([builtin], Brought("/elsewhere"))] == [4]
    assert needs_of([], Brought()) == []


def test_of_hundreds_of_adapters_with_one_config_those_with_another_keep_theirs(tmp_path: Path):
    ranks = [128 if number in (3, 177) else 16 for number in range(200)]
    for number, rank in enumerate(ranks):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "adapter_config.json").write_text(f'{{"r": {rank}}}')
    entries = [LoraPath(name=f"a{number}", path=str(number)) for number in range(200)]

    assert [one.rank for one in needs_of(entries, Brought(str(tmp_path)))] == ranks
