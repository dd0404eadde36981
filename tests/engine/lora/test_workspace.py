"""Adapters are read by several threads, into memory where others were before, and come out as if one by one."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rota.core.errors import AdapterError
from rota.engine.lora.files import checkpoint, workspace
from rota.engine.lora.files.checkpoint import read_checkpoint
from rota.engine.lora.files.folder import SINGLE, AdapterFolder, FolderFiles
from rota.engine.lora.files.workspace import Workspace
from rota.engine.lora.host import PIECE_BYTES, HostAdapter, copied, cut_evenly, side_by_side
from rota.engine.model.spec import ModelSpec
from tests.engine.lora.adapter_factory import change_dtype, make_adapter
from tests.engine.lora.test_checkpoint import KINDS


def copy(adapter: HostAdapter, threads: int) -> HostAdapter:
    """As the real one, in memory that is not pinned."""
    (run,) = adapter.pieces
    return HostAdapter(copied(run, torch.empty_like, threads), adapter.site_ranks, adapter.ranks, adapter.gain_bias)


@pytest.fixture
def work() -> Workspace:
    return Workspace(threads=3, pin=copy)


def versions(folder: Path, model: Any, count: int = 3, dtype: torch.dtype = torch.float32, **kind: Any) -> list[Path]:
    """Folders that differ in their numbers alone."""
    made = [folder / str(number) for number in range(count)]
    for seed, place in enumerate(made):
        change_dtype(make_adapter(place, model, seed, **kind), dtype)
    return made


def run_of(adapter: HostAdapter) -> torch.Tensor:
    return torch.cat([piece.view(-1) for piece in adapter.pieces])


@pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match")
@pytest.mark.parametrize("kind", ["plain", "odd parts", "one layer", "patterns"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_version_is_read_as_it_would_be_alone(kind, dtype, model, spec: ModelSpec, tmp_path, work):
    for folder in versions(tmp_path, model, dtype=dtype, **KINDS[kind]):
        alone, among_others = (read_checkpoint(folder, spec, dtype, 16, work=one) for one in (checkpoint.PLAIN, work))
        assert torch.equal(run_of(alone), run_of(among_others))
        assert torch.equal(alone.ranks, among_others.ranks)
        assert alone.site_ranks == among_others.site_ranks


def test_numbers_that_are_none_are_found_in_later_versions_too(model, spec, tmp_path, work):
    good, bad, last = versions(tmp_path, model)
    read_checkpoint(good, spec, torch.float32, 16, work=work)
    content = bytearray((bad / SINGLE).read_bytes())
    content[-4:] = b"\x00\x00\xc0\x7f"
    (bad / SINGLE).write_bytes(content)

    with pytest.raises(AdapterError, match=r"the tensor '.*' has values that are NaN or infinite"):
        read_checkpoint(bad, spec, torch.float32, 16, work=work)
    alone = read_checkpoint(last, spec, torch.float32, 16)
    assert torch.equal(run_of(alone), run_of(read_checkpoint(last, spec, torch.float32, 16, work=work)))


def test_a_version_that_is_cut_off_is_refused(model, spec, tmp_path, work):
    good, bad, _ = versions(tmp_path, model)
    read_checkpoint(good, spec, torch.float32, 16, work=work)
    (bad / SINGLE).write_bytes((bad / SINGLE).read_bytes()[:-8])

    with pytest.raises(AdapterError, match="truncated or corrupt"):
        read_checkpoint(bad, spec, torch.float32, 16, work=work)


def test_adapters_of_several_ranks_take_each_others_memory(model, spec, tmp_path, work):
    folders = [make_adapter(tmp_path / str(rank), model, r=rank) for rank in (4, 8, 2, 6)]
    for folder in folders * 2:
        alone = read_checkpoint(folder, spec, torch.float32, 16)
        assert torch.equal(run_of(alone), run_of(read_checkpoint(folder, spec, torch.float32, 16, work=work)))


def test_readers_beside_each_other_have_memory_each(model, spec, tmp_path, work):
    folders = versions(tmp_path, model, count=4)
    alone = [run_of(read_checkpoint(folder, spec, torch.float32, 16)) for folder in folders]
    failures = list[int]()

    def read(number: int) -> None:
        for _ in range(20):
            found = read_checkpoint(folders[number], spec, torch.float32, 16, work=work)
            if not torch.equal(run_of(found), alone[number]):
                failures.append(number)

    side_by_side([partial(read, number) for number in range(4)])
    assert not failures


def test_a_large_adapter_takes_its_memory_along(monkeypatch):
    monkeypatch.setattr(workspace, "MOST_BYTES", 100)
    work, adapter = Workspace(pin=lambda adapter, _: adapter), HostAdapter((), (), torch.zeros(0))
    for size, is_kept in ((100, True), (101, False)):
        memory = work.take(size)
        work.done(adapter, memory)
        assert (work.take(1) is memory) == is_kept


class Used(Workspace):
    """Threads, and memory in which another adapter lay."""

    def take(self, size: int) -> Tensor:
        return torch.full((size,), 0xFF, dtype=torch.uint8)  # numbers that are none


@pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match")
@pytest.mark.parametrize("kind", ["plain", "odd parts", "one layer", "patterns"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_threads_and_used_memory_change_no_bit(kind, dtype, model, spec, tmp_path):
    make_adapter(tmp_path, model, **KINDS[kind])
    change_dtype(tmp_path, dtype)

    plain, used = (read_checkpoint(tmp_path, spec, dtype, 16, work=work) for work in (Workspace(), Used(threads=3)))

    assert torch.equal(plain.pieces[0], used.pieces[0])


@pytest.mark.parametrize("alpha", [4, 6])
def test_half_precision_in_the_file_gives_what_single_precision_is_rounded_to(alpha, model, spec, tmp_path):
    make_adapter(tmp_path, model, lora_alpha=alpha)
    change_dtype(tmp_path, torch.bfloat16)
    half = read_checkpoint(tmp_path, spec, torch.bfloat16, 16)
    change_dtype(tmp_path, torch.float32)

    assert torch.equal(half.pieces[0], read_checkpoint(tmp_path, spec, torch.bfloat16, 16).pieces[0])


def test_a_disk_that_gives_a_little_at_a_time_is_asked_again(model, spec: ModelSpec, tmp_path, monkeypatch):
    make_adapter(tmp_path, model)
    whole, preadv = read_checkpoint(tmp_path, spec, torch.float32, 16), os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, targets, start: preadv(file, [_some(targets[0])], start))

    assert torch.equal(read_checkpoint(tmp_path, spec, torch.float32, 16).pieces[0], whole.pieces[0])


def _some(target: bytearray) -> memoryview:
    return memoryview(target).cast("B")[:1000]


def test_a_file_that_becomes_shorter_while_it_is_read_is_refused_with_the_tensor(model, tmp_path):
    make_adapter(tmp_path, model)
    with FolderFiles(tmp_path) as files:
        last = max(AdapterFolder(files).files[0].tensors.values(), key=lambda stored: stored.end)
        path = tmp_path / "adapter_model.safetensors"
        os.truncate(path, path.stat().st_size - 1)

        with pytest.raises(AdapterError, match=f"corrupt: it ends in the middle of the tensor '{last.name}'"):
            last.read()


def test_a_copy_in_pieces_holds_the_same():
    run = torch.arange(2 * PIECE_BYTES // 4 + 7, dtype=torch.float32)
    pieces = copied(run, torch.empty_like, threads=2)

    assert [piece.nbytes for piece in pieces] == [PIECE_BYTES, PIECE_BYTES, 28]
    assert torch.equal(torch.cat(pieces), run)


def test_every_number_is_in_one_range_and_none_is_empty():
    assert cut_evenly(7, 3) == [range(2), range(2, 4), range(4, 7)]
    assert cut_evenly(2, 8) == [range(1), range(1, 2)]


def test_all_jobs_end_before_the_error_of_one_is_raised():
    done = list[int]()

    def job(number: int) -> Callable[[], None]:
        def work() -> None:
            done.append(number)
            if number == 1:
                raise ValueError("the second")

        return work

    with pytest.raises(ValueError, match="the second"):
        side_by_side([job(number) for number in range(4)])
    assert sorted(done) == [0, 1, 2, 3]
