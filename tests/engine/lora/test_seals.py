"""A version is what its first read has found: every later read must find the same, whoever reads and however."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rota.core.adapter import Adapter
from rota.core.errors import AdapterChangedError, AdapterError, FaultCode
from rota.core.ids import AdapterId
from rota.engine.lora.bank import Bank
from rota.engine.lora.files import checkpoint
from rota.engine.lora.files.checkpoint import read_checkpoint
from rota.engine.lora.files.folder import CONFIG, SINGLE
from rota.engine.lora.files.reader import AdapterReader, RefusedAdapter
from rota.engine.lora.files.tensor_file import TensorFile
from rota.engine.lora.files.workspace import PLAIN, Workspace
from rota.engine.lora.loader import checkpoint_reader
from rota.engine.model.spec import ModelSpec
from rota.engine.parallel.shard import WHOLE, Shard
from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.lora.small_bank import CPU
from tests.waiting import TIMEOUT_S


def working(threads: int, packs: bool) -> Workspace:
    return Workspace(threads, packs, pin=lambda adapter, _: adapter)


def seal_of(folder: Path, spec: ModelSpec, work: Workspace = PLAIN, shard: Shard = WHOLE, former: str = "") -> str:
    return read_checkpoint(folder, spec, torch.float32, 16, work=work, shard=shard, seal=former).seal


def overwrite(folder: Path) -> None:
    """One number becomes another, in place, and the file's times are what they were."""
    path = folder / SINGLE
    before, content = path.stat(), bytearray(path.read_bytes())
    content[-2] ^= 1
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("packs", [False, True])
def test_a_seal_does_not_depend_on_threads_or_on_what_was_read_before(spec, model, tmp_path, packs):
    folder = make_adapter(tmp_path / "one", model, seed=1)
    several = working(3, packs)

    seals = {seal_of(folder, spec, work) for work in (several, several, working(1, packs), working(2, packs))}
    assert len(seals) == 1
    assert seals != {seal_of(make_adapter(tmp_path / "other", model, seed=2), spec, several)}


@pytest.mark.parametrize("work", [PLAIN, working(2, packs=False), working(2, packs=True)], ids=["CPU", "put", "packed"])
def test_a_number_that_was_overwritten_is_found_though_size_and_times_are_the_same(spec, model, tmp_path, work):
    folder = make_adapter(tmp_path / "one", model, seed=1)
    former = seal_of(folder, spec, work)
    assert seal_of(folder, spec, work, former=former) == former
    overwrite(folder)

    with pytest.raises(AdapterChangedError):
        seal_of(folder, spec, work, former=former)


def test_every_rank_has_a_seal_of_its_own_part(spec, model, tmp_path):
    folder = make_adapter(tmp_path / "one", model, seed=1)
    former = [seal_of(folder, spec, shard=Shard(rank, 2)) for rank in (0, 1)]

    assert [seal_of(folder, spec, shard=Shard(rank, 2), former=former[rank]) for rank in (0, 1)] == former
    assert former[0] != former[1]


def test_a_file_that_was_copied_back_has_not_changed(spec, model, tmp_path):
    folder = make_adapter(tmp_path / "one", model, seed=1)
    former = seal_of(folder, spec)
    content = (folder / SINGLE).read_bytes()
    (folder / SINGLE).unlink()
    (folder / SINGLE).write_bytes(content)

    assert seal_of(folder, spec, former=former) == former


def test_a_config_that_changed_is_refused_before_it_is_understood(spec, model, tmp_path, monkeypatch):
    folder = make_adapter(tmp_path / "one", model, seed=1)
    former = seal_of(folder, spec)
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | {"target_modules": "([a-z0-9_.]+)+!"}))
    monkeypatch.setattr(checkpoint, "AdapterFolder", None)

    with pytest.raises(AdapterChangedError):
        seal_of(folder, spec, former=former)


def test_a_file_that_is_written_while_it_is_read_is_refused(spec, model, tmp_path, monkeypatch):
    folder = make_adapter(tmp_path / "one", model, seed=1)
    read: Callable[..., None] = TensorFile._read

    def read_and_write(file: TensorFile, *arguments: object) -> None:
        read(file, *arguments)
        os.utime(file.path, ns=(0, 0))

    monkeypatch.setattr(TensorFile, "_read", read_and_write)
    with pytest.raises(AdapterError, match="was written to while it was read; load it again when it is whole"):
        seal_of(folder, spec)


def test_the_reader_says_which_version_changed_and_the_scheduler_hears_what_it_is(spec, model, tmp_path):
    bank = Bank(spec, 1, 16, torch.float32, CPU)
    folder = make_adapter(tmp_path / "one", model, seed=1)
    read = checkpoint_reader(bank, spec)
    first = Adapter(adapter_id=AdapterId(7), name="acme-legal", path=str(folder), version=3)
    seal = read(first).seal
    again = Adapter(adapter_id=AdapterId(7), name="acme-legal", path=str(folder), version=3, seals=(seal,))
    assert read(again).seal == seal
    overwrite(folder)

    reader = AdapterReader(read)
    refused = reader.submit(again).result(TIMEOUT_S)
    reader.close()
    sentence = "'acme-legal' changed since version 3 was loaded; PUT it again."
    assert refused == RefusedAdapter(sentence, FaultCode.ADAPTER_CHANGED)
