"""Adapters of different ranks share pages: each is found whole, and nothing is left of who had its pages before."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rota.core.ids import Slot
from rota.engine.lora import bank as bank_module
from rota.engine.lora.bank import Bank, slot_bytes
from rota.engine.lora.copies import lines_of, stretches_of
from rota.engine.lora.files.ranks import PAGE_RANK, pages_for
from rota.engine.lora.host import HostAdapter, run_length, stacked_sites
from rota.engine.model.sites import SITES, site_shapes
from tests.engine.lora.small_bank import CPU, SMALL, copy_within_the_host

MAX_RANK, PAGES, SLOTS = 24, 7, 3
Ranks = tuple[int, ...]


def paged_bank(has_stage: bool = False) -> Bank:
    return Bank(SMALL, SLOTS, MAX_RANK, torch.float32, CPU, has_stage=has_stage, pages=PAGES)


def host_adapter(ranks: Ranks, first: float, piece: int = 10_000) -> HostAdapter:
    """An adapter whose numbers all differ."""
    length = run_length(site_shapes(SMALL), SMALL.layers, ranks)
    run = torch.arange(first, first + length)
    return HostAdapter(run.split(piece), ranks, torch.tensor([ranks] * SMALL.layers, dtype=torch.int32))


def assert_holds(bank: Bank, slot: int, adapter: HostAdapter) -> None:
    run = torch.cat(adapter.pieces)
    sites = stacked_sites(run, site_shapes(SMALL), SMALL.layers, adapter.site_ranks)
    for site, name, rank in zip(sites, SITES, adapter.site_ranks, strict=True):
        for layer in range(SMALL.layers):
            factors = bank.factors(layer, name)
            assert int(factors.ranks[slot]) == rank
            a, b = factors.of_slot(slot, rank)
            assert torch.equal(a, site.a[layer].flatten(0, 1))
            assert torch.equal(b, site.b[layer])
            assert not any(beyond.any() for beyond in beyond_rank(bank, layer, name, slot))


def beyond_rank(bank: Bank, layer: int, site: str, slot: int) -> list[torch.Tensor]:
    """What the last page of a slot holds beyond its rank: fused LoRA A multiply it, so it must be nought."""
    factors = bank.factors(layer, site)
    rank, parts = int(factors.ranks[slot]), len(factors.shape.parts)
    assert factors.table is not None
    if rank % PAGE_RANK == 0:
        return []
    page = int(factors.table[slot, rank // PAGE_RANK])
    return [factors.a[page].view(parts, PAGE_RANK, -1)[:, rank % PAGE_RANK :], factors.b[page, rank % PAGE_RANK :]]


SiteRanks = st.tuples(*[st.integers(0, MAX_RANK)] * len(SITES))
Moves = st.lists(st.tuples(st.integers(0, SLOTS - 1), SiteRanks, st.permutations(range(PAGES))), min_size=1, max_size=6)


@given(Moves, st.integers(20, 300), st.booleans())
def test_every_slot_holds_its_newest_resident_whichever_slots_had_its_pages_before(moves, piece, has_stage):
    bank = paged_bank(has_stage)
    held: dict[int, tuple[HostAdapter, set[int]]] = {}
    for number, (slot, ranks, order) in enumerate(moves):
        held.pop(slot, None)
        pages = order[: max(1, pages_for(max(ranks)))]
        adapter = host_adapter(ranks, 1.0 + 10_000 * number, piece)
        # As the ledger does: whoever has the pages has left its slot.
        held = {other: one for other, one in held.items() if one[1].isdisjoint(pages)}
        bank.copy_in(Slot(slot), adapter, pages)
        held[slot] = (adapter, set(pages))
    for slot, (adapter, _) in held.items():
        assert_holds(bank, slot, adapter)


@pytest.mark.parametrize(("rank", "places"), [(8, (3,)), (5, (3,)), (20, (4, 0, 2)), (16, (1, 2, 5))])
def test_a_batched_copy_finds_each_line_by_its_address(rank, places):
    a, b = torch.zeros(2, PAGES, 3 * PAGE_RANK, 8), torch.zeros(2, PAGES, PAGE_RANK, 16)
    lines = lines_of(a, b, places, rank)
    assert stretches_of(a, b, places, rank).tolist() == [[line.data_ptr(), line.nbytes] for line in lines]
    assert sum(line.numel() for line in lines) == 2 * rank * (3 * 8 + 16)


def test_a_batched_copy_fills_pages_as_copies_one_by_one_do(monkeypatch):
    copy_within_the_host(monkeypatch)
    monkeypatch.setattr(bank_module, "can_batch", lambda _: True)
    bank, adapter = paged_bank(), host_adapter((20, 0, 3, 8), 1.0, piece=77)
    bank.copy_in(Slot(1), adapter, (6, 0, 3))
    assert_holds(bank, 1, adapter)


@pytest.mark.parametrize("rank", [8, 20])
def test_pages_may_lie_below_the_matrices(rank):
    shape = site_shapes(SMALL)[0]
    rows = PAGES * len(shape.parts) * PAGE_RANK
    block = torch.zeros(SMALL.layers, shape.outputs + rows + 3, shape.inputs)
    fused_lora_a = {"qkv": block[:, shape.outputs : shape.outputs + rows]}
    bank = Bank(SMALL, SLOTS, MAX_RANK, torch.float32, CPU, fused_lora_a, pages=PAGES)
    adapter = host_adapter((rank,) * len(SITES), 1.0)
    bank.copy_in(Slot(2), adapter, (5, 1, 2)[: pages_for(rank)])

    assert_holds(bank, 2, adapter)
    assert not block[:, : shape.outputs].any()
    assert not block[:, shape.outputs + rows :].any()


def test_a_slot_whose_copy_failed_leaves_other_slots_pages_alone():
    bank = paged_bank()
    small, large = host_adapter((8,) * 4, 1.0), host_adapter((20,) * 4, 50_000.0)
    bank.copy_in(Slot(0), large, (0, 1, 2))
    bank.copy_in(Slot(1), small, (2,))  # the first has left
    bank.spoil(Slot(0), (3, 4))
    assert_holds(bank, 1, small)
    down = bank.factors(SMALL.layers - 1, "down")
    a, b = down.of_slot(0, int(down.ranks[0]))
    assert torch.isnan(a @ torch.ones(SMALL.intermediate_size) @ b).all()
    bank.clear(Slot(0), (3, 4))
    assert not bank.factors(0, "qkv").ranks[0]
    whole = host_adapter((3, 9, 16, 1), 9.0)
    bank.copy_in(Slot(2), whole, (4, 3))
    assert_holds(bank, 2, whole)


def test_an_adapter_takes_the_bytes_of_its_own_rank():
    page = slot_bytes(SMALL, PAGE_RANK, torch.float32)
    assert paged_bank().size_bytes == PAGES * page
    assert paged_bank(has_stage=True).size_bytes == PAGES * page + slot_bytes(SMALL, MAX_RANK, torch.float32)
    assert [paged_bank().pages_of(host_adapter((rank, 0, 1, 2), 0.0)) for rank in (4, 8, 9, 24)] == [1, 1, 2, 3]
    assert Bank(SMALL, 2, MAX_RANK, torch.float32, CPU).pages_of(host_adapter((20,) * 4, 0.0)) == 0


@pytest.mark.parametrize("pages", [(), (1,), (1, 2)])
def test_an_adapter_without_a_page_for_each_rank_is_not_copied(pages):
    bank = paged_bank()
    with pytest.raises(AssertionError, match="page"):
        bank.copy_in(Slot(0), replace(host_adapter((20,) * 4, 1.0)), pages)
    assert not bank.factors(0, "qkv").ranks.any()
