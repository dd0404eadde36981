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
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("tiny")
    return folder, make_tiny_model(folder, "qwen3")


@pytest.fixture(scope="session")
def model_folder(made: tuple[Path, PreTrainedModel]) -> Path:
    return made[0]


@pytest.fixture(scope="session")
def model(made: tuple[Path, PreTrainedModel]) -> PreTrainedModel:
    return made[1]


@pytest.fixture(scope="session")
def spec(model_folder: Path) -> ModelSpec:
    return read_spec(model_folder)


@pytest.fixture
def folder(model: PreTrainedModel, tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "adapter", model)
