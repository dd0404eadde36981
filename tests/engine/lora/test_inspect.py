"""A description says what is in an adapter folder, and whether a model can serve it."""

from __future__ import annotations

import pytest
import torch

from rota.commands.adapters.inspect import describe
from rota.core.errors import AdapterError
from tests.engine.lora.adapter_factory import change_config, change_dtype, change_tensors, make_adapter


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
