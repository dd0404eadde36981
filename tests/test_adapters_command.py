from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from rota.cli import main
from tests.engine.lora.adapter_factory import change_config, make_adapter
from tests.engine.model_factory import make_tiny_model


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def model(model_folder) -> PreTrainedModel:
    return make_tiny_model(model_folder, "smollm2")


@pytest.fixture
def adapter(model, tmp_path) -> Path:
    return make_adapter(tmp_path / "adapter", model, target_modules=["q_proj", "o_proj"], use_rslora=True)


def inspect(*arguments: str | Path) -> int | str | None:
    with pytest.raises(SystemExit) as end:
        main(["adapters", "inspect", *map(str, arguments)])
    return end.value.code


def test_an_adapter_is_described(adapter, capsys):
    change_config(adapter, base_model_name_or_path="org/[tiny]")

    assert inspect(adapter) == 0
    lines = {line.strip().split("  ")[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    for name, value in {
        "made for": "org/[tiny]",
        "rank": "4",
        "alpha": "6 (rank-stabilised)",
        "modules": "q_proj, o_proj",
        "layers": "2, from 0 to 1",
        "stored as": "float32, ",
    }.items():
        assert value in lines[name]


def test_a_model_that_can_serve_it_is_named(adapter, model_folder, capsys):
    assert inspect(adapter, "--model", model_folder) == 0
    assert f"The model in {model_folder} can serve it." in capsys.readouterr().out


def test_every_reason_why_a_model_cannot_serve_it_is_told_with_code_1(adapter, model_folder, capsys):
    change_config(adapter, use_dora=True)

    assert inspect(adapter, "--model", model_folder, "--max-lora-rank", "2") == 1
    shown = capsys.readouterr().out
    assert f"The model in {model_folder} cannot serve it:" in shown
    assert "- " in shown
    assert "use_dora" in shown
    assert "over the limit of 2" in shown


def test_where_there_is_nothing_to_describe_a_sentence_says_so_with_code_2(tmp_path, capsys):
    assert inspect(tmp_path) == 2
    assert "is not an adapter folder" in capsys.readouterr().err
