"""A slot holds its newest resident and nothing of the former ones: in a place or in pages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rota.core.ids import Slot
from rota.engine.lora import bank as bank_module
from rota.engine.lora import copies
from rota.engine.lora.bank import Bank, pays_staging, slot_bytes
from rota.engine.lora.copies import can_batch, copy_stretches, cut_stretches, lines_of, stretches_of
from rota.engine.lora.files.checkpoint import read_checkpoint
from rota.engine.lora.files.ranks import PAGE_RANK, pages_for
from rota.engine.lora.host import HostAdapter, run_length, stacked_sites
from rota.engine.model.sites import SITES, site_shapes
from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.lora.small_bank import (
    CPU,
    LLAMA_8B,
    MAX_RANK,
    SMALL,
    assert_equal,
    copy_within_the_host,
    host_adapter,
)


@pytest.mark.parametrize("has_stage", [False, True])
def test_the_operations_find_an_adapter_as_the_layout_says(model, spec, tmp_path, has_stage):
    make_adapter(tmp_path, model, target_modules=["k_proj", "v_proj", "down_proj"], rank_pattern={"k_proj": 2})
    adapter = read_checkpoint(tmp_path, spec, torch.float32, MAX_RANK)
    bank = Bank(spec, 3, MAX_RANK, torch.float32, CPU, has_stage=has_stage)
    bank.copy_in(Slot(1), adapter)

    qkv = bank.factors(1, "qkv")
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    assert [qkv.a.shape, qkv.b.shape] == [(3, 3 * MAX_RANK, spec.hidden_size), (3, MAX_RANK, queries + 2 * keys)]
    assert qkv.a.is_contiguous()
    assert qkv.b.is_contiguous()
    assert qkv.ranks.is_contiguous()
    assert qkv.ranks.tolist() == [0, 4, 0]
    site = stacked_sites(adapter.pieces[0], site_shapes(spec), spec.layers, adapter.site_ranks)[0]
    assert torch.equal(qkv.a[1, MAX_RANK : MAX_RANK + 2], site.a[1, 1, :2])  # k
    assert torch.equal(qkv.a[1, 2 * MAX_RANK : 2 * MAX_RANK + 4], site.a[1, 2])  # v
    assert torch.equal(qkv.b[1, :4], site.b[1])
    used = torch.zeros(3 * MAX_RANK, dtype=torch.bool)
    used[[MAX_RANK, MAX_RANK + 1, *range(2 * MAX_RANK, 2 * MAX_RANK + 4)]] = True
    assert not qkv.a[1, ~used].any()
    assert not qkv.b[1, 4:].any()
    assert not qkv.a[0].any()
    assert not qkv.a[2].any()
    assert bank.factors(0, "gate_up").ranks.tolist() == [0, 0, 0]
    assert bank.factors(0, "down").ranks.tolist() == [0, 4, 0]


Residencies = st.lists(
    st.tuples(st.integers(0, 1), st.tuples(*[st.integers(0, MAX_RANK)] * len(SITES))), min_size=1, max_size=6
)


@given(Residencies)
def test_a_slot_forgets_its_former_residents(residencies):
    bank = Bank(SMALL, 2, MAX_RANK, torch.float32, CPU)
    newest = {}
    for number, (slot, ranks) in enumerate(residencies, start=1):
        bank.copy_in(Slot(slot), host_adapter(ranks, fill=number))
        newest[slot] = (number, ranks)

    fresh = Bank(SMALL, 2, MAX_RANK, torch.float32, CPU)
    for slot, (number, ranks) in newest.items():
        fresh.copy_in(Slot(slot), host_adapter(ranks, fill=number))
    assert_equal(bank, fresh)


@given(Residencies, st.integers(1, 300))
def test_a_slot_holds_the_same_with_a_stage_and_without_however_the_host_cuts_an_adapter(residencies, piece):
    banks = [Bank(SMALL, 2, MAX_RANK, torch.float32, CPU, has_stage=has_stage) for has_stage in (False, True)]
    for number, (slot, ranks) in enumerate(residencies):
        adapter = host_adapter(ranks, fill=0.0)
        run = torch.arange(adapter.pieces[0].numel()) + 1000.0 * number
        for bank in banks:
            bank.copy_in(Slot(slot), replace(adapter, pieces=run.split(piece)))
    assert_equal(*banks)


@pytest.mark.parametrize("rank", [2, MAX_RANK])
def test_without_a_stage_an_adapter_also_finds_its_place_below_the_matrices(rank):
    shape = site_shapes(SMALL)[0]
    rows = 2 * len(shape.parts) * MAX_RANK
    block = torch.zeros(SMALL.layers, shape.outputs + rows + 3, shape.inputs)
    fused_lora_a = {"qkv": block[:, shape.outputs : shape.outputs + rows]}
    below = Bank(SMALL, 2, MAX_RANK, torch.float32, CPU, fused_lora_a, has_stage=False)
    apart = Bank(SMALL, 2, MAX_RANK, torch.float32, CPU, has_stage=True)
    adapter = host_adapter((rank,) * len(SITES), fill=0.0)
    run = torch.arange(1.0, adapter.pieces[0].numel() + 1.0)
    for bank in (below, apart):
        bank.copy_in(Slot(1), replace(adapter, pieces=run.split(100)))

    assert_equal(below, apart)
    assert not block[:, : shape.outputs].any()
    assert not block[:, shape.outputs + rows :].any()


def test_a_cleared_slot_has_no_adapter_and_is_filled_again(model, spec, tmp_path):
    make_adapter(tmp_path, model)
    adapter = read_checkpoint(tmp_path, spec, torch.float32, MAX_RANK)
    bank, fresh = (Bank(spec, 2, MAX_RANK, torch.float32, CPU) for _ in range(2))
    bank.copy_in(Slot(1), adapter)
    bank.clear(Slot(1))
    assert not bank.factors(0, "qkv").ranks.any()
    assert bank.generation(1) == 2
    for each in (bank, fresh):
        each.copy_in(Slot(1), adapter)
    assert torch.equal(bank.factors(1, "down").a, fresh.factors(1, "down").a)
    assert bank.factors(1, "down").ranks.tolist() == [0, 4]


def test_the_tensors_stay_where_a_captured_graph_found_them():
    bank = Bank(SMALL, 1, MAX_RANK, torch.float32, CPU)
    before = bank.factors(0, "o")
    bank.copy_in(Slot(0), host_adapter((2, 3, 0, 1), fill=1.0))

    assert before.ranks.tolist() == [3]
    assert before.b[0, :3].eq(1.0).all()


def test_slots_take_what_the_factors_take():
    bank = Bank(SMALL, 5, MAX_RANK, torch.bfloat16, CPU)
    taken = sum(
        tensor.nbytes
        for layer in range(SMALL.layers)
        for site in SITES
        for tensor in (bank.factors(layer, site).a, bank.factors(layer, site).b)
    )

    assert taken == 5 * slot_bytes(SMALL, MAX_RANK, torch.bfloat16) == bank.size_bytes


def test_a_bank_takes_exactly_its_places_unless_it_has_a_stage():
    place = slot_bytes(SMALL, MAX_RANK, torch.float32)
    sizes = {
        has_stage: Bank(SMALL, 3, MAX_RANK, torch.float32, CPU, has_stage=has_stage).size_bytes
        for has_stage in (False, True, None)
    }
    assert sizes == {False: 3 * place, True: 4 * place, None: 3 * place}


@pytest.fixture
def one_copy_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver without batched copies."""
    monkeypatch.setattr(bank_module, "can_batch", lambda _: False)


@pytest.mark.usefixtures("one_copy_a_call")
def test_a_stage_pays_on_a_gpu_whose_copies_would_be_small():
    gpu = torch.device("cuda")
    assert pays_staging(SMALL, 64, torch.bfloat16, gpu)
    assert not pays_staging(SMALL, 64, torch.bfloat16, CPU)
    assert not pays_staging(LLAMA_8B, 16, torch.bfloat16, gpu)
    assert pays_staging(LLAMA_8B, 4, torch.bfloat16, gpu)


def test_no_stage_pays_where_the_driver_takes_all_copies_in_one_call(monkeypatch):
    monkeypatch.setattr(bank_module, "can_batch", lambda device: device.type == "cuda")
    assert not pays_staging(SMALL, 64, torch.bfloat16, torch.device("cuda"))


# Adapters of different ranks share pages: each is found whole, and nothing is left of who had its pages before.


LARGEST_RANK, PAGES, SLOTS = 24, 7, 3
Ranks = tuple[int, ...]


def paged_bank(has_stage: bool = False) -> Bank:
    return Bank(SMALL, SLOTS, LARGEST_RANK, torch.float32, CPU, has_stage=has_stage, pages=PAGES)


def counting_adapter(ranks: Ranks, first: float, piece: int = 10_000) -> HostAdapter:
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


SiteRanks = st.tuples(*[st.integers(0, LARGEST_RANK)] * len(SITES))
Moves = st.lists(st.tuples(st.integers(0, SLOTS - 1), SiteRanks, st.permutations(range(PAGES))), min_size=1, max_size=6)


@given(Moves, st.integers(20, 300), st.booleans())
def test_every_slot_holds_its_newest_resident_whichever_slots_had_its_pages_before(moves, piece, has_stage):
    bank = paged_bank(has_stage)
    held: dict[int, tuple[HostAdapter, set[int]]] = {}
    for number, (slot, ranks, order) in enumerate(moves):
        held.pop(slot, None)
        pages = order[: max(1, pages_for(max(ranks)))]
        adapter = counting_adapter(ranks, 1.0 + 10_000 * number, piece)
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
    bank, adapter = paged_bank(), counting_adapter((20, 0, 3, 8), 1.0, piece=77)
    bank.copy_in(Slot(1), adapter, (6, 0, 3))
    assert_holds(bank, 1, adapter)


@pytest.mark.parametrize("rank", [8, 20])
def test_pages_may_lie_below_the_matrices(rank):
    shape = site_shapes(SMALL)[0]
    rows = PAGES * len(shape.parts) * PAGE_RANK
    block = torch.zeros(SMALL.layers, shape.outputs + rows + 3, shape.inputs)
    fused_lora_a = {"qkv": block[:, shape.outputs : shape.outputs + rows]}
    bank = Bank(SMALL, SLOTS, LARGEST_RANK, torch.float32, CPU, fused_lora_a, pages=PAGES)
    adapter = counting_adapter((rank,) * len(SITES), 1.0)
    bank.copy_in(Slot(2), adapter, (5, 1, 2)[: pages_for(rank)])

    assert_holds(bank, 2, adapter)
    assert not block[:, : shape.outputs].any()
    assert not block[:, shape.outputs + rows :].any()


def test_a_slot_whose_copy_failed_leaves_other_slots_pages_alone():
    bank = paged_bank()
    small, large = counting_adapter((8,) * 4, 1.0), counting_adapter((20,) * 4, 50_000.0)
    bank.copy_in(Slot(0), large, (0, 1, 2))
    bank.copy_in(Slot(1), small, (2,))  # the first has left
    bank.spoil(Slot(0), (3, 4))
    assert_holds(bank, 1, small)
    down = bank.factors(SMALL.layers - 1, "down")
    a, b = down.of_slot(0, int(down.ranks[0]))
    assert torch.isnan(a @ torch.ones(SMALL.intermediate_size) @ b).all()
    bank.clear(Slot(0), (3, 4))
    assert not bank.factors(0, "qkv").ranks[0]
    whole = counting_adapter((3, 9, 16, 1), 9.0)
    bank.copy_in(Slot(2), whole, (4, 3))
    assert_holds(bank, 2, whole)


def test_an_adapter_takes_the_bytes_of_its_own_rank():
    page = slot_bytes(SMALL, PAGE_RANK, torch.float32)
    assert paged_bank().size_bytes == PAGES * page
    assert paged_bank(has_stage=True).size_bytes == PAGES * page + slot_bytes(SMALL, LARGEST_RANK, torch.float32)
    assert [paged_bank().pages_of(counting_adapter((rank, 0, 1, 2), 0.0)) for rank in (4, 8, 9, 24)] == [1, 1, 2, 3]
    assert Bank(SMALL, 2, LARGEST_RANK, torch.float32, CPU).pages_of(counting_adapter((20,) * 4, 0.0)) == 0


@pytest.mark.parametrize("pages", [(), (1,), (1, 2)])
def test_an_adapter_without_a_page_for_each_rank_is_not_copied(pages):
    bank = paged_bank()
    with pytest.raises(AssertionError, match="page"):
        bank.copy_in(Slot(0), replace(counting_adapter((20,) * 4, 1.0)), pages)
    assert not bank.factors(0, "qkv").ranks.any()


# A batched copy moves the same bytes to the same places as the copies one by one.

sizes = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@given(targets=sizes, cuts=st.sets(st.integers(1, 100)))
def test_every_byte_is_copied_once_and_in_order(targets: list[int], cuts: set[int]) -> None:
    total = sum(targets)
    ends = [*sorted(cut for cut in cuts if cut < total), total]
    sources = [(1000 + begin, end - begin) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    starts = [sum(targets[:index]) * 2 for index in range(len(targets))]  # with gaps between the targets
    copies = cut_stretches(np.array(list(zip(starts, targets, strict=True))), np.array(sources)).T.tolist()
    read = [byte for _, source, size in copies for byte in range(source, source + size)]
    written = [byte for target, _, size in copies for byte in range(target, target + size)]
    assert read == list(range(1000, 1000 + total))
    assert written == [byte for start, size in zip(starts, targets, strict=True) for byte in range(start, start + size)]


def test_a_run_of_another_length_is_never_copied() -> None:
    with pytest.raises(AssertionError, match="same bytes"):
        cut_stretches(np.array([(0, 4)]), np.array([(8, 3)]))


def test_a_cpu_copies_without_the_driver() -> None:
    assert not can_batch(torch.device("cpu"))


@pytest.mark.parametrize("ranks", [(MAX_RANK,) * len(SITES), (2, 0, MAX_RANK, 3)])
def test_a_slot_holds_the_same_after_a_batched_copy(ranks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    copy_within_the_host(monkeypatch)
    one_by_one = Bank(SMALL, 2, MAX_RANK, torch.float32, CPU)
    monkeypatch.setattr(bank_module, "can_batch", lambda _: True)
    batched = Bank(SMALL, 2, MAX_RANK, torch.float32, CPU)
    for each in (one_by_one, batched):
        for fill in (1.0, 2.0, 3.0):  # the third copy finds the addresses of the first
            each.copy_in(Slot(1), host_adapter(ranks, fill))
    assert_equal(batched, one_by_one)


def test_a_refused_batch_is_an_error_with_the_drivers_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_driver_call", lambda: lambda *_: 719)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: type("Stream", (), {"cuda_stream": 0}))
    with pytest.raises(RuntimeError, match="error 719"):
        copy_stretches(np.array([(0, 4)]), np.array([(8, 4)]))
