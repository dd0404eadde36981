"""A check of config and headers says what a full read says, but for the values, and is made once for each recipe."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rota.core.adapter import Adapter, Extra
from rota.core.errors import AdapterError
from rota.core.ids import AdapterId
from rota.engine.lora.files import checks
from rota.engine.lora.files.brought import Brought
from rota.engine.lora.files.checkpoint import read_checkpoint
from rota.engine.lora.files.checks import HeaderCheck, SlotKind, refusals
from rota.engine.lora.files.folder import CONFIG, SINGLE, AdapterFolder
from rota.engine.model.spec import ModelSpec
from tests.engine.lora.adapter_factory import change_config, change_tensors

SLOTS = SlotKind(16, Extra.NONE, matrices=0)
Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def adapter(path: Path, **fields: Any) -> Adapter:
    return Adapter(adapter_id=AdapterId(1), name="one", path=str(path), **fields)


def shorten(folder: Path) -> None:
    whole = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(whole[:-1])


FAULTS = {
    "no config": lambda folder: (folder / CONFIG).unlink(),
    "no weights": lambda folder: (folder / SINGLE).unlink(),
    "a short file": shorten,
    "another kind": lambda folder: change_config(folder, peft_type="LOHA"),
    "a rank over the limit": lambda folder: change_config(folder, r=99),
    "another model's": lambda folder: change_tensors(folder, lambda all: all.update({Q_A: torch.zeros(4, 3)})),
    "a factor alone": lambda folder: change_tensors(folder, lambda all: all.pop(Q_A)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_it_refuses_with_the_sentence_of_a_full_read(fault, folder: Path, spec: ModelSpec):
    check = HeaderCheck(spec, SLOTS)
    assert check(adapter(folder)) == ""
    FAULTS[fault](folder)

    with pytest.raises(AdapterError) as refused:
        read_checkpoint(folder, spec, torch.float32, max_rank=16)
    assert check(adapter(folder)) == str(refused.value)


def test_weights_are_not_read(folder: Path, spec: ModelSpec):
    change_tensors(folder, lambda all: all[Q_A].fill_(torch.nan))
    assert HeaderCheck(spec, SLOTS)(adapter(folder)) == ""


def test_a_folder_outside_the_adapter_root_is_refused_though_its_like_was_let_in(
    folder: Path, spec: ModelSpec, tmp_path: Path
):
    inside = shutil.copytree(folder, tmp_path / "root" / "inside")
    check = HeaderCheck(spec, SLOTS, Brought(str(tmp_path / "root")))

    assert check(adapter(inside)) == ""
    assert "leads outside the adapter root" in check(adapter(folder))
    assert check(adapter(folder, is_builtin=True)) == ""


def test_adapters_of_one_recipe_are_checked_once(folder: Path, spec: ModelSpec, tmp_path: Path, monkeypatch):
    checked = []

    def count(opened: AdapterFolder, *given: Any) -> Iterator[str]:
        checked.append(opened.path.name)
        return refusals(opened, *given)

    monkeypatch.setattr(checks, "refusals", count)
    change_tensors(folder, lambda all: all[Q_A].add_(1.0))
    other = shutil.copytree(folder, tmp_path / "other")
    change_config(other, lora_alpha=7)
    twin = shutil.copytree(folder, tmp_path / "twin")
    change_tensors(twin, lambda all: all[Q_A].add_(1.0))
    check = HeaderCheck(spec, SLOTS)
    for path in (folder, other, twin):
        assert check(adapter(path)) == ""

    assert checked == ["adapter", "other"], "the twin differs in its weights alone"
