"""Tensors that are read in parallel are those of the file, whatever fails or comes late."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rota.core.errors import ModelError
from rota.engine.parallel.shard import Cut
from rota.engine.weights.read_ahead import ALIGNMENT, RingSetup, WeightRing, cut_into_runs, no_copier, pinned_on_gpu
from rota.engine.weights.shards import FileRange, read_places
from tests.engine.weights.copiers import FailingCopier, LateCopier, PlainCopier

SMALL = RingSetup(threads=3, buffers=2, buffer_bytes=256)
WIDTHS = (5, 300, 1, 64, 0, 999, 2)


def nowhere(name: str, _target: Tensor, _cut: Cut | None) -> None:
    """No tensor may be copied from elsewhere."""
    raise AssertionError(name)


class Elsewhere:
    def __init__(self) -> None:
        self.names: list[str] = []

    def copy(self, name: str, target: Tensor, cut: Cut | None = None) -> None:
        self.names.append(name)


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    dice = torch.Generator().manual_seed(7)
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    return {f"t{i}": torch.randn(width, generator=dice).to(kinds[i % 3]) for i, width in enumerate(WIDTHS)}


@pytest.fixture
def places(tmp_path, tensors) -> dict[str, FileRange]:
    save_file(tensors, tmp_path / "some.safetensors")
    found = read_places(tmp_path / "some.safetensors")
    return {name: found[name] for name in tensors}  # in the order of a model, not in the file's


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rota-weights")]


def read_all(reads: WeightRing, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    targets = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}
    with reads:
        for name, target in targets.items():
            reads.copy(name, target)
    return targets


def refusal(reads: WeightRing, tensors: dict[str, Tensor]) -> str:
    with pytest.raises(ModelError) as error:
        read_all(reads, tensors)
    assert threads() == []
    return str(error.value)


def test_runs_hold_every_byte_once_and_a_piece_begins_where_any_number_may(places):
    runs = cut_into_runs(places, 256)
    for name, place in places.items():
        pieces = [piece for run in runs for piece in run if piece.name == name]
        edges = [place.start, *(piece.start + piece.size for piece in pieces)]
        assert [piece.start for piece in pieces] == edges[:-1]
        assert edges[-1] == place.end
    for run in runs:
        assert [piece.at % ALIGNMENT for piece in run] == [0] * len(run)
        assert all(piece.at + piece.size <= after.at for piece, after in itertools.pairwise(run))
        assert run[-1].at + run[-1].size <= 256


@pytest.mark.parametrize(
    "size",
    [
        SMALL,
        RingSetup(threads=1, buffers=1, buffer_bytes=64),
        RingSetup(threads=8, buffers=16, buffer_bytes=1 << 20),
        RingSetup(threads=2, buffers=5, buffer_bytes=128),
    ],
)
@pytest.mark.parametrize("kind", [PlainCopier, LateCopier])
def test_tensors_arrive_bit_for_bit_however_late_buffers_come_back(places, tensors, size, kind):
    copier = kind()
    found = read_all(WeightRing(places, copier, size, nowhere), tensors)

    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert 1 <= copier.most_buffers <= size.buffers
    assert copier.buffers == 0
    assert threads() == []


def test_a_read_may_give_less_than_was_asked_for(places, tensors):
    def read(file: int, buffers: Sequence[memoryview], start: int) -> int:
        return os.preadv(file, [buffers[0][:7]], start)

    found = read_all(WeightRing(places, PlainCopier(), replace(SMALL, read=read), nowhere), tensors)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_file_that_is_cut_while_it_is_read_is_named(places, tensors):
    path = places["t5"].path

    def read(file: int, buffers: Sequence[memoryview], start: int) -> int:
        if start >= places["t5"].start:
            os.truncate(path, places["t5"].start + 500)
        return os.preadv(file, buffers, start)

    sentence = refusal(WeightRing(places, PlainCopier(), replace(SMALL, read=read), nowhere), tensors)
    assert sentence.startswith(f"{path} is truncated: while it was read, it ended in the middle of the tensor '")


def test_a_disk_that_fails_in_the_middle_ends_the_reads_with_its_word(places, tensors):
    def read(file: int, buffers: Sequence[memoryview], start: int) -> int:
        if start >= places["t3"].start:
            raise OSError(errno.EIO, "Input/output error")
        return os.preadv(file, buffers, start)

    copier = PlainCopier()
    sentence = refusal(WeightRing(places, copier, replace(SMALL, read=read), nowhere), tensors)
    assert sentence == f"{places['t3'].path} cannot be read (Input/output error)."
    assert copier.buffers == 0


def test_a_file_that_has_gone_is_named(places, tensors):
    places["t0"].path.unlink()
    assert "some.safetensors cannot be read (No such file" in refusal(
        WeightRing(places, PlainCopier(), SMALL, nowhere), tensors
    )


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ("buffer", "The weights cannot be read into memory: CUDA error: no buffer."),
        ("wait", "The weights cannot be read into memory: CUDA error: no wait."),
        ("copy", "The tensor 't1' cannot be copied to cpu: CUDA error: no copy."),
    ],
)
def test_a_copier_that_fails_ends_the_reads_with_a_sentence(places, tensors, where, sentence):
    copier = FailingCopier(where)
    assert refusal(WeightRing(places, copier, SMALL, nowhere), tensors) == sentence
    assert copier.buffers == 0


def test_whoever_stops_in_the_middle_leaves_no_thread_behind(places):
    copier = PlainCopier()
    with WeightRing(places, copier, RingSetup(threads=2, buffers=2, buffer_bytes=64), nowhere) as reads:
        reads.copy("t0", torch.empty(WIDTHS[0]))  # the threads have more to read, and wait for buffers
    assert threads() == []
    assert copier.buffers == 0


def test_a_tensor_out_of_turn_or_of_another_order_in_memory_comes_from_elsewhere(places):
    elsewhere, target = Elsewhere(), torch.empty(WIDTHS[0])
    with WeightRing(places, PlainCopier(), SMALL, elsewhere.copy) as reads:
        reads.copy("t1", torch.empty(WIDTHS[1]))
        reads.copy("t0", torch.empty(2 * WIDTHS[0])[::2])
        reads.copy("t0", target)
        reads.copy("unknown", target)
    assert elsewhere.names == ["t1", "t0", "unknown"]
    assert bool(target.isfinite().all())


def test_rows_of_a_tensor_lie_one_after_the_other():
    place = FileRange(path=Path("f"), start=100, end=100 + 6 * 5 * 2, dtype=torch.bfloat16)
    rows = place.rows(Cut(0, 2, 5, 6))
    assert (rows.start, rows.end, rows.numbers) == (120, 150, 15)


def test_a_cpu_s_weights_take_no_buffers():
    assert pinned_on_gpu(torch.device("cpu")) is None
    assert no_copier(torch.device("cuda")) is None  # type: ignore[func-returns-value]
