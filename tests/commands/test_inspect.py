"""`rota adapters inspect` says what is in an adapter folder, and whether a model can serve it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rota.cli import main
from rota.commands.adapters.inspect import describe
from rota.core.errors import AdapterError
from rota.engine.families.table import read_spec
from rota.engine.model.spec import ModelSpec
from tests.engine.lora.adapter_factory import change_config, change_dtype, change_tensors, make_adapter
from tests.engine.model_factory import make_tiny_model


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("tiny")
    return folder, make_tiny_model(folder, "qwen3")


@pytest.fixture(scope="module")
def model_folder(made) -> Path:
    return made[0]


@pytest.fixture(scope="module")
def model(made) -> PreTrainedModel:
    return made[1]


@pytest.fixture(scope="module")
def spec(model_folder) -> ModelSpec:
    return read_spec(model_folder)


@pytest.fixture
def adapter(model, tmp_path) -> Path:
    return make_adapter(tmp_path / "adapter", model, target_modules=["q_proj", "o_proj"], use_rslora=True)


def inspect(*arguments: str | Path) -> int | str | None:
    with pytest.raises(SystemExit) as end:
        main(["adapters", "inspect", *map(str, arguments)])
    return end.value.code


def test_a_description_is_shown(adapter, capsys):
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


def test_an_adapter_is_described_by_what_is_in_its_files(model, spec, tmp_path):
    make_adapter(
        tmp_path, model, target_modules=["v_proj", "q_proj"], rank_pattern={"q_proj": 2}, layers_to_transform=[1]
    )
    change_config(tmp_path, base_model_name_or_path="org/tiny")
    change_dtype(tmp_path, torch.bfloat16)

    described = describe(tmp_path, spec, max_rank=16)

    assert described.base_model == "org/tiny"
    assert described.ranks == (2, 4)
    assert described.modules == ("q_proj", "v_proj")
    assert described.layers == (1,)
    assert described.dtypes == ("bfloat16",)
    assert described.size_bytes == (tmp_path / "adapter_model.safetensors").stat().st_size
    assert described.reasons == ()


def test_whole_matrices_and_rows_for_tokens_are_named_too(model, spec, tmp_path):
    make_adapter(
        tmp_path, model, target_modules=["q_proj"], modules_to_save=["lm_head"], trainable_token_indices=[3, 4]
    )
    described = describe(tmp_path, spec)
    assert described.modules == ("q_proj", "embed_tokens", "lm_head")
    assert described.reasons == ()


@pytest.fixture
def folder(model, tmp_path) -> Path:
    return make_adapter(tmp_path / "adapter", model)


def test_every_kind_of_reason_is_given_once(spec, folder):
    change_config(folder, use_dora=True, bias="some", target_modules=["q_proj", "c_attn"])
    change_tensors(folder, lambda tensors: tensors.update({name: tensors[name][:, :3] for name in tensors}))

    reasons = "\n".join(describe(folder, spec, max_rank=2).reasons)

    for part in ("'use_dora'", "'bias'", "'c_attn'", "rank 4, over the limit of 2", "does not target", "64 inputs"):
        assert reasons.count(part) == 1, part


def test_values_are_looked_at_when_all_else_is_well(spec, folder):
    change_tensors(folder, lambda tensors: next(iter(tensors.values())).fill_(torch.nan))

    assert "NaN or infinite" in describe(folder, spec, max_rank=16).reasons[0]


def test_without_a_model_only_the_adapter_itself_is_judged(spec, folder):
    change_config(folder, target_modules=["c_attn"])

    assert describe(folder, None, max_rank=16).reasons == ()
    assert describe(folder, spec, max_rank=16).reasons
    assert "over the limit of 3" in describe(folder, None, max_rank=3).reasons[0]


def test_a_folder_with_nothing_to_describe_is_an_error(spec, tmp_path):
    with pytest.raises(AdapterError, match="is not an adapter folder"):
        describe(tmp_path, spec, max_rank=16)
