"""A tiny model, made once, and an adapter of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from rota.engine.families.table import read_spec
from rota.engine.model.spec import ModelSpec
from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.model_factory import make_tiny_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="session")
def model(model_folder: Path) -> PreTrainedModel:
    return make_tiny_model(model_folder, "qwen3")


@pytest.fixture(scope="session")
def spec(model: PreTrainedModel, model_folder: Path) -> ModelSpec:
    return read_spec(model_folder)


@pytest.fixture
def folder(model: PreTrainedModel, tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "adapter", model)
