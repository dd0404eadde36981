from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rota.core.config import EngineConfig, ModelConfig
from rota.runtime.ranks import meeting as module
from rota.runtime.ranks.meeting import difference, facts


def model_in(folder: Path, weights: bytes = b"w" * 500_000, config: str = "{}") -> EngineConfig:
    folder.mkdir()
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").write_bytes(weights)
    return EngineConfig(model=ModelConfig(model_path=str(folder), tensor_parallel_size=2))


def test_the_same_model_in_another_folder_is_the_same(tmp_path):
    here, there = model_in(tmp_path / "here"), model_in(tmp_path / "there")

    assert difference(facts(here), {1: facts(replace(there, rank=1, device_number=1))}) == ""


def test_another_fine_tune_of_the_same_shape_differs_in_its_weights(tmp_path):
    own = facts(model_in(tmp_path / "here"))
    other = facts(model_in(tmp_path / "there", weights=b"v" * 500_000))

    sentence = difference(own, {1: own, 2: other})
    assert "rank 2 has" in sentence
    assert "for the model's weights" in sentence
    assert "rank 1" not in sentence


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_only_weights_that_are_read_are_compared(tmp_path, load_format):
    config = model_in(tmp_path / "here")
    config = replace(config, model=replace(config.model, load_format=load_format))
    before = facts(config)
    (tmp_path / "here" / "model.safetensors").write_bytes(b"short")

    assert (facts(config) == before) == (load_format == "dummy")


def test_another_config_and_other_flags_are_named_with_both_values(tmp_path):
    here = model_in(tmp_path / "here")
    there = model_in(tmp_path / "there", config='{"layers": 3}')
    there = replace(there, model=replace(there.model, dtype="float32"))

    sentence = difference(facts(here), {1: facts(there)})
    assert "rank 1 has float32 for --dtype, and rank 0 has auto" in sentence
    assert "for the model's config.json" in sentence
    assert "weights" not in sentence


def test_another_version_is_named(tmp_path, monkeypatch):
    config = model_in(tmp_path / "here")
    own = facts(config)
    assert "the version of torch" in own
    monkeypatch.setattr(module.metadata, "distributions", lambda **_: [SimpleNamespace(version="0.0.1")])

    assert "rank 1 has 0.0.1 for the version of rota" in difference(own, {1: facts(config)})


def test_a_library_that_one_rank_lacks_is_named(tmp_path):
    own = facts(model_in(tmp_path / "here"))
    without = {name: word for name, word in own.items() if name != "the version of torch"}

    assert "rank 1 has nothing for the version of torch" in difference(own, {1: without})


def test_a_folder_that_is_missing_is_left_to_the_engine(tmp_path):
    assert facts(EngineConfig(model=ModelConfig(model_path=str(tmp_path / "no"))))
