"""Factors are read by several threads, into memory that held others, and come out as if one by one."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rota.core.errors import AdapterError
from rota.engine.lora.files.checkpoint import read_checkpoint
from rota.engine.lora.files.folder import AdapterFolder, FolderFiles
from rota.engine.lora.files.workspace import Workspace
from rota.engine.lora.host import PIECE_BYTES, copied, cut_evenly, side_by_side
from rota.engine.model.spec import ModelSpec
from tests.engine.lora.adapter_factory import change_dtype, make_adapter
from tests.engine.lora.test_checkpoint import KINDS


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
