"""Ranks cut biases, magnitudes, the head's factors and own heads; behind a sum, only one rank adds a bias."""

from __future__ import annotations

import pytest
import torch

from rota.core.adapter import Extra
from rota.core.config import FirstAdapters
from rota.core.errors import AdapterError
from rota.engine.families.table import read_spec
from rota.engine.lora.base import BaseMatrices
from rota.engine.lora.files.checkpoint import read_checkpoint
from rota.engine.model.sites import site_shapes
from rota.engine.parallel.shard import Shard
from rota.engine.weights.load import load_weights
from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.model_factory import make_tiny_model
from tests.engine.parallel.story import GroupServer, asked, play

FEATURES = {
    1: {"use_dora": True, "target_modules": ["q_proj", "v_proj", "gate_proj"], "modules_to_save": ["lm_head"]},
    2: {"lora_bias": True, "bias": "all"},
    3: {"bias": "lora_only", "target_modules": ["q_proj", "o_proj", "lm_head", "embed_tokens"]},
}
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trims")
    model = make_tiny_model(folder / "model", "granite", attention_bias=True, mlp_bias=True)
    for number, fields in FEATURES.items():
        make_adapter(folder / str(number), model, seed=number, **fields)
    make_adapter(folder / "summed", model, use_dora=True, target_modules=["o_proj"])
    return folder


def test_two_ranks_answer_as_one_does(folder, group_of):
    first = FirstAdapters(count=3, rank=4, pages=3, extras=Extra.GAIN_BIAS | Extra.HEAD | Extra.EMBEDDING, matrices=2)
    one = play(GroupServer(folder / "model", None, first=first), folder, asked(NEW_TOKENS))
    two = play(GroupServer(folder / "model", group_of(2), first=first), folder, asked(NEW_TOKENS))
    assert two.tokens == one.tokens
    assert not one.failures
    assert not two.failures


def test_a_norm_over_rows_that_ranks_share_is_refused(folder):
    spec, shard = read_spec(folder / "model"), Shard(0, 2)
    weights = load_weights(folder / "model", spec, torch.device("cpu"), torch.float32, quiet=True, shard=shard)
    base = BaseMatrices(weights.layers, site_shapes(shard.local(spec)), torch.float32, torch.device("cpu"))
    with pytest.raises(AdapterError, match="are cut between 2 ranks; serve it with --tensor-parallel-size 1"):
        read_checkpoint(folder / "summed", spec, torch.float32, 8, shard=shard, base=base)
