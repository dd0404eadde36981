"""A slot holds its newest resident and nothing of the former ones, whatever their ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rota.core.ids import Slot
from rota.engine.lora import bank as bank_module
from rota.engine.lora.bank import Bank, pays_staging, slot_bytes
from rota.engine.lora.files.checkpoint import read_checkpoint
from rota.engine.lora.host import stacked_sites
from rota.engine.model.sites import SITES, site_shapes
from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.lora.small_bank import CPU, MAX_RANK, SMALL, assert_equal, host_adapter


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
    llama = replace(
        SMALL, hidden_size=4096, intermediate_size=14336, layers=32, heads=32, kv_heads=8, head_dim=128, vocab_size=9
    )
    assert pays_staging(SMALL, 64, torch.bfloat16, gpu)
    assert not pays_staging(SMALL, 64, torch.bfloat16, CPU)
    assert not pays_staging(llama, 16, torch.bfloat16, gpu)
    assert pays_staging(llama, 4, torch.bfloat16, gpu)


def test_no_stage_pays_where_the_driver_takes_all_copies_in_one_call(monkeypatch):
    monkeypatch.setattr(bank_module, "can_batch", lambda device: device.type == "cuda")
    assert not pays_staging(SMALL, 64, torch.bfloat16, torch.device("cuda"))
