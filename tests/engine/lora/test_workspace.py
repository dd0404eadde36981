"""Adapters are put together where others were before, and come out as if alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rota.core.errors import AdapterError
from rota.engine.lora.files import checkpoint, workspace
from rota.engine.lora.files.checkpoint import read_checkpoint
from rota.engine.lora.files.folder import SINGLE
from rota.engine.lora.files.workspace import Workspace
from rota.engine.lora.host import HostAdapter, copied, side_by_side
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
