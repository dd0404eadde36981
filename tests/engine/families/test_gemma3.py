"""Gemma 3's folders, in the spelling of old and of new ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rota.core.errors import ModelError
from rota.engine.families.table import read_spec
from rota.engine.model.spec import ModelSpec

CONFIG = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 64,
    "intermediate_size": 8,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "sliding_window": 512,
    "max_position_embeddings": 32_768,
}


def read(folder: Path, **fields: Any) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **fields}))
    return read_spec(folder)


def test_every_sixth_layer_sees_all_tokens_unless_the_folder_says_otherwise(tmp_path):
    six = (512,) * 5 + (None,)
    assert read(tmp_path).windows == six * 2
    assert read(tmp_path, sliding_window_pattern=3).windows == ((512, 512, None) * 4)


def test_a_layer_without_a_window_keeps_every_block(tmp_path):
    assert read(tmp_path).widest_window is None


def test_layers_with_a_window_have_their_own_rotary_base_in_either_spelling(tmp_path):
    old = read(
        tmp_path,
        rope_theta=1e6,
        rope_local_base_freq=2e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    new = read(
        tmp_path,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    )
    for spec in (old, new):
        assert (spec.rotary.kind, spec.rotary.factor, spec.rotary.theta) == ("linear", 8.0, 1e6)
        assert spec.window_rotary is not None
        assert (spec.window_rotary.kind, spec.window_rotary.theta) == ("default", 2e4)


def test_bases_that_the_folder_leaves_out_are_gemmas(tmp_path):
    spec = read(tmp_path)
    assert spec.window_rotary is not None
    assert (spec.rotary.theta, spec.window_rotary.theta) == (1e6, 1e4)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"attn_logit_softcapping": 50.0}, "sets 'attn_logit_softcapping', which Rota does not compute"),
        ({"use_bidirectional_attention": True}, "sets 'use_bidirectional_attention'"),
        ({"hidden_activation": "relu"}, "asks for the activation 'relu'; Gemma 3 has 'gelu_pytorch_tanh'"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path, fields, sentence):
    with pytest.raises(ModelError, match=sentence):
        read(tmp_path, **fields)
