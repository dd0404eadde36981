"""A packed adapter stays as its file is, and lies in its slot as if the host had put it together."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from rota.core.errors import AdapterError
from rota.core.ids import Slot
from rota.engine.lora import bank as bank_module
from rota.engine.lora import packing as packing_module
from rota.engine.lora.bank import Bank
from rota.engine.lora.files import checkpoint, workspace
from rota.engine.lora.files.checkpoint import packing_of, read_checkpoint
from rota.engine.lora.files.folder import SINGLE, AdapterFolder, FolderFiles
from rota.engine.lora.files.workspace import Workspace
from rota.engine.lora.host import side_by_side
from rota.engine.lora.packing import turn, unturned_bytes
from rota.engine.model.sites import site_shapes
from rota.engine.model.spec import ModelSpec
from rota.engine.parallel.shard import Shard
from tests.engine.lora.adapter_factory import ATTENTION, change_dtype, change_tensors, make_adapter
from tests.engine.lora.small_bank import CPU, assert_equal, copy_within_the_host
from tests.engine.lora.test_checkpoint import KINDS
from tests.engine.triton_interpreter import DEVICE, load

MAX_RANK, SLOTS = 16, 3
STAYS_PACKED = {
    "plain": {},
    "rank 1": KINDS["rank 1"],
    "rank-stabilised": KINDS["rank-stabilised"],
    "attention only": {"target_modules": ATTENTION},
    "a scale of one": {"lora_alpha": 4},
    "the largest rank": {"r": MAX_RANK},
    "PEFT's own choice": {"target_modules": ["q_proj", "v_proj"]},
    "odd parts": KINDS["odd parts"],
    "one layer": KINDS["one layer"],
    "a whole name": KINDS["a whole name"],
}
IS_PUT_TOGETHER = {
    "ranks": {"rank_pattern": {"k_proj": 2}},
    "scales": {"alpha_pattern": {"down_proj": 5}},
    "biases": {"lora_bias": True},
    "DoRA": {"use_dora": True},
    "a head": {"target_modules": [*ATTENTION, "lm_head"]},
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch) -> None:
    """Factors end in the middle of pieces, and pieces in the middle of factors."""
    monkeypatch.setattr(checkpoint, "PIECE_BYTES", 1000)
    monkeypatch.setattr(checkpoint, "STRETCH_BYTES", 600)
    copy_within_the_host(monkeypatch)
    monkeypatch.setattr(bank_module, "can_batch", lambda _: True)


@pytest.fixture
def work() -> Workspace:
    return Workspace(threads=3, packs=True, pin=lambda adapter, _: adapter)


def bank_of(spec: ModelSpec, dtype: torch.dtype, pages: int = 0) -> Bank:
    return Bank(spec, SLOTS, MAX_RANK, dtype, CPU, pages=pages, has_stage=False, unpacks=True)


@pytest.mark.parametrize(("dtype", "pages"), [(torch.float32, 6), (torch.bfloat16, 0)])
@pytest.mark.parametrize("kind", STAYS_PACKED)
def test_a_slot_holds_the_same_whoever_puts_the_factors_there(kind, dtype, pages, model, spec, tmp_path, work):
    before, folder = make_adapter(tmp_path / "before", model, seed=1, r=12), tmp_path / "one"
    make_adapter(folder, model, **STAYS_PACKED[kind])
    packed, put_together = bank_of(spec, dtype, pages), bank_of(spec, dtype, pages)
    for path in (before, folder):
        change_dtype(path, dtype)
        one, other = (read_checkpoint(path, spec, dtype, MAX_RANK, work=each) for each in (work, checkpoint.PLAIN))
        assert one.packing is not None
        assert other.packing is None
        places = [4, 1][: packed.pages_of(one)]
        packed.copy_in(Slot(1), one, places)
        put_together.copy_in(Slot(1), other, places)
    assert_equal(packed, put_together)


def test_adapters_that_lie_alike_are_cut_once_whichever_pages_they_get(model, spec, tmp_path, work, monkeypatch):
    cut = Mock(wraps=packing_module.cut)
    monkeypatch.setattr(packing_module, "cut", cut)
    found, expected = (bank_of(spec, torch.float32, pages=6) for _ in range(2))
    for seed, slot, places in ((1, 0, [4, 1]), (2, 1, [0, 5])):
        make_adapter(tmp_path / str(seed), model, seed=seed, r=12)
        for bank, each in ((found, work), (expected, checkpoint.PLAIN)):
            bank.copy_in(
                Slot(slot), read_checkpoint(tmp_path / str(seed), spec, torch.float32, MAX_RANK, work=each), places
            )
    assert cut.call_count == 1
    assert_equal(found, expected)


@pytest.mark.parametrize("kind", IS_PUT_TOGETHER)
def test_what_a_file_does_not_have_as_a_bank_needs_it_is_put_together(kind, model, spec, tmp_path):
    make_adapter(tmp_path, model, **IS_PUT_TOGETHER[kind])
    with FolderFiles(tmp_path) as files:
        folder = AdapterFolder(files)
        assert packing_of(folder, site_shapes(spec), spec.layers, torch.float32) is None


@pytest.mark.parametrize("precision", [torch.float32, torch.float16])
@pytest.mark.parametrize("alpha", [4, 8, 1])
def test_numbers_of_another_precision_are_rounded_while_they_are_read(alpha, precision, model, spec, tmp_path, work):
    make_adapter(tmp_path, model, r=4, lora_alpha=alpha)
    change_dtype(tmp_path, precision)
    found, expected = (bank_of(spec, torch.bfloat16) for _ in range(2))
    for bank, each in ((found, work), (expected, checkpoint.PLAIN)):
        adapter = read_checkpoint(tmp_path, spec, torch.bfloat16, MAX_RANK, work=each)
        assert (adapter.packing is not None) == (each is work)
        bank.copy_in(Slot(1), adapter)
    assert_equal(found, expected)


@pytest.mark.parametrize(("alpha", "dtype"), [(5, torch.bfloat16), (4, torch.float16)])
def test_where_a_scale_must_come_first_they_are_put_together(alpha, dtype, model, spec, tmp_path, work):
    make_adapter(tmp_path, model, r=4, lora_alpha=alpha)
    assert read_checkpoint(tmp_path, spec, dtype, MAX_RANK, work=work).packing is None


def test_so_is_a_file_with_a_tensor_that_is_no_factor(folder, spec, work):
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_velora_embed"
    change_tensors(folder, lambda tensors: tensors.update({name: torch.full((4,), torch.nan)}))
    assert read_checkpoint(folder, spec, torch.float32, MAX_RANK, work=work).packing is None


def test_weights_that_rounding_makes_infinite_are_refused(folder, spec, work):
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    change_tensors(folder, lambda tensors: tensors[name][3].fill_(torch.finfo(torch.float32).max))
    with pytest.raises(AdapterError, match=r"has weights too large for torch\.bfloat16"):
        read_checkpoint(folder, spec, torch.bfloat16, MAX_RANK, work=work)


def test_so_is_the_part_that_a_rank_of_several_reads(folder, spec, work):
    assert read_checkpoint(folder, spec, torch.float32, MAX_RANK, work=work, shard=Shard(0, 2)).packing is None


def test_only_the_first_of_its_kind_is_understood(model, spec, tmp_path, work, monkeypatch):
    seen = list[Path]()

    def understand(files: Any, layers: int = 0) -> AdapterFolder:
        seen.append(files.path)
        return AdapterFolder(files, layers)

    monkeypatch.setattr(checkpoint, "AdapterFolder", understand)
    folders = [make_adapter(tmp_path / str(seed), model, seed=seed) for seed in range(3)]
    adapters = [read_checkpoint(folder, spec, torch.float32, MAX_RANK, work=work) for folder in folders]
    assert seen == folders[:1]
    assert len({id(adapter.packing) for adapter in adapters}) == 1
    assert {adapter.size_bytes for adapter in adapters} == {sum(piece.nbytes for piece in adapters[0].pieces)}


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_none_are_refused(is_first, bad, model, spec, tmp_path, work):
    folder = make_adapter(tmp_path / "bad", model)
    if not is_first:
        read_checkpoint(make_adapter(tmp_path / "good", model, seed=1), spec, torch.float32, MAX_RANK, work=work)
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    change_tensors(folder, lambda tensors: tensors[name][3].fill_(bad))
    with pytest.raises(AdapterError, match=f"'{name}' has values that are NaN or infinite"):
        read_checkpoint(folder, spec, torch.float32, MAX_RANK, work=work)


def test_a_file_that_becomes_shorter_while_it_is_read_is_refused(folder, spec, work, monkeypatch):
    def shorten(size: int) -> torch.Tensor:
        os.truncate(folder / SINGLE, (folder / SINGLE).stat().st_size - 1)
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(work, "memory", shorten)
    with pytest.raises(AdapterError, match="truncated or corrupt: it ends in the middle of the tensor 'base_model"):
        read_checkpoint(folder, spec, torch.float32, MAX_RANK, work=work)


def test_kinds_that_were_not_seen_for_long_are_forgotten(model, spec, tmp_path, work, monkeypatch):
    monkeypatch.setattr(workspace, "MOST_PACKINGS", 2)
    folders = [make_adapter(tmp_path / str(rank), model, r=rank) for rank in (1, 2, 3)]
    for number in (0, 1, 0, 2):
        read_checkpoint(folders[number], spec, torch.float32, MAX_RANK, work=work)
    kept = [packing.site_ranks[0] for packing in work._packings.values()]
    assert kept == [1, 3]


def test_readers_beside_each_other_do_not_meet(model, spec, tmp_path, work):
    folders = [make_adapter(tmp_path / str(seed), model, seed=seed) for seed in range(4)]
    contents = [(folder / SINGLE).read_bytes() for folder in folders]
    failures = list[int]()

    def read(number: int) -> None:
        for _ in range(20):
            pieces = read_checkpoint(folders[number], spec, torch.float32, MAX_RANK, work=work).pieces
            if not contents[number].endswith(torch.cat(pieces).numpy().tobytes()):
                failures.append(number)

    side_by_side([partial(read, number) for number in range(4)])
    assert not failures


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rank", "outputs", "scale"), [(16, 300, 1.0), (5, 40, 0.7), (1, 17, 2.0), (48, 513, 1.0 / 3)])
def test_the_kernel_turns_as_torch_does(rank, outputs, scale, dtype):
    kernel = load("rota.engine.lora.triton_ops").turn
    if DEVICE == "cpu" and dtype is torch.bfloat16:
        scale = 2.0  # to bfloat16 the interpreter cuts off, where a GPU rounds
    stored = torch.randn(3, outputs, rank).to(DEVICE, dtype)
    for first, count in {(0, rank), (rank // 2, rank - rank // 2), (rank // 3, 1)}:
        found, expected = (torch.full((3, 4, count + 2, outputs), 7.0, dtype=dtype, device=DEVICE) for _ in range(2))
        kernel(stored, first, found[:, 2, 1:-1], scale)
        turn(stored, first, expected[:, 2, 1:-1], scale)
        assert torch.equal(found, expected)


def test_the_place_where_b_is_turned_is_counted(spec):
    usual = Bank(spec, SLOTS, MAX_RANK, torch.bfloat16, CPU, has_stage=False)
    more = unturned_bytes(spec, MAX_RANK, torch.bfloat16)
    assert more > 0
    assert bank_of(spec, torch.bfloat16).size_bytes == usual.size_bytes + more
