"""Config and headers tell what a full read would refuse, but for the values; hostile bytes get a sentence at once."""

from __future__ import annotations

import json
import shutil
import time
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
from rota.engine.lora.files.outline import Files, FilesOf, Header, Outline, OutlineOf, answer, answered
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


# An outline is made of bytes that anybody may have written: of all else a sentence is made, at once.

A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
FACTOR = {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]}


def outline_of(config: Any = PLAIN, header: Any = None) -> Outline:
    """JSON, or bytes that are to be JSON."""
    parts = [part if isinstance(part, bytes) else json.dumps(part).encode() for part in (config, header or {A: FACTOR})]
    question = OutlineOf("config", parts[0], (Header("weights", parts[1]),), ("model.layers.0.self_attn.q_proj",))
    found = answered(answer, question)
    assert isinstance(found, Outline)
    return found


def refusal(**parts: Any) -> str:
    with pytest.raises(AdapterError) as caught:
        outline_of(**parts)
    return str(caught.value)


def test_a_config_may_be_in_the_metadata_and_one_beside_the_weights_counts_first():
    inside = {"__metadata__": {"adapter_config": json.dumps(PLAIN | {"r": 2})}, A: FACTOR}
    assert outline_of(config=b"", header=inside).config.rank == 2
    assert outline_of(header=inside).config.rank == 4
    assert "no config in the weights' metadata under 'adapter_config'" in refusal(config=b"")
    assert "config cannot be read" in refusal(config=b"", header={"__metadata__": {"adapter_config": "{"}})


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"config": b"[" * 100_000}, "config is nested too deeply"),
        ({"config": b'{"r":' * 100_000}, "config is nested too deeply"),
        ({"header": b"[" * 100_000}, "its header is nested too deeply"),
        ({"config": b'{"r": ' + b"9" * 4000 + b"}"}, "a number of 4000 digits"),
        ({"header": {A: FACTOR | {"shape": [10**17] * 9}}}, "has 9 dimensions"),
        ({"header": {A: FACTOR | {"shape": [4.0, 8]}}}, "needs whole numbers"),
        ({"header": {A: FACTOR | {"data_offsets": [0.0, 128.0]}}}, "needs whole numbers"),
        ({"header": {A: FACTOR | {"data_offsets": [True, 128]}}}, "needs whole numbers"),
        ({"header": {A: FACTOR | {"data_offsets": [-1, 127]}}}, "needs whole numbers"),
        ({"header": {A: FACTOR | {"data_offsets": [0, 1, 2]}}}, "does not say where the tensor"),
        ({"header": {A: FACTOR | {"data_offsets": [0, float("inf")]}}}, "Infinity is no number of JSON"),
        ({"header": {A: {}}}, "does not say where the tensor"),
        ({"header": {A: "F32"}}, "does not say where the tensor"),
        ({"header": {A: FACTOR | {"dtype": ["F32"]}}}, "needs whole numbers"),
        ({"header": b"\xff\xfe"}, "its header cannot be read"),
        ({"config": {"r": "x" * 100_000}}, "'r' must be a whole number"),
        ({"config": {"rank_pattern": {"(": 1}}}, "'(' is no regular expression"),
        ({"config": {"target_modules": "(" * 50_000 + ")" * 50_000}}, "is no regular expression"),
        ({"config": {"target_modules": "a{99999999999999999999}"}}, ""),
        ({"config": PLAIN | {"layers_to_transform": [0], "layers_pattern": ["m|"]}}, ""),
        ({"config": PLAIN | {"bias": "\ud800"}}, "\\ud800"),
        ({"header": {A + "\ud800": FACTOR}}, ""),
        ({"config": PLAIN | {"layers_to_transform": [0]}, "header": {A.replace("0", "9" * 5000): FACTOR}}, ""),
    ],
)
def test_hostile_bytes_are_refused_with_a_short_sentence_at_once(parts, words):
    began = time.process_time()
    sentence = refusal(**parts)
    assert words in sentence
    assert len(sentence) < 1100
    assert time.process_time() - began < 2.0


def test_an_index_names_files():
    found = answered(answer, FilesOf("index", b'{"weight_map": {"a": "two", "b": "one", "c": "two"}}'))
    assert found == Files(("one", "two"))
    spelled = json.dumps({"weight_map": dict(enumerate(["one", "./one", "a/../one", "././one"]))})
    assert answered(answer, FilesOf("index", spelled.encode())) == Files(("one",)), "one file has one name"


@pytest.mark.parametrize("pattern", ["(" * 900 + ")" * 900, "a{99999999999999999999}"])
def test_a_pattern_that_python_cannot_compile_is_refused(pattern):
    with pytest.raises(AdapterError, match="is no regular expression"):
        answered(answer, OutlineOf("", json.dumps(PLAIN | {"target_modules": pattern}).encode(), (), ()))
