"""What a folder's config.json says, and the sentences for what it cannot say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rota.core.errors import ModelError
from rota.engine.families.table import read_spec
from rota.engine.model.spec import ModelSpec
from tests.engine.model_factory import FAMILIES, make_tiny_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


def read(folder: Path, **fields: Any) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **fields}))
    return read_spec(folder)


def refusal(folder: Path, **fields: Any) -> str:
    with pytest.raises(ModelError) as error:
        read(folder, **fields)
    return str(error.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_saved_by_transformers_is_understood(tmp_path, family):
    config = make_tiny_model(tmp_path, family).config
    spec = read_spec(tmp_path)
    assert (spec.layers, spec.hidden_size, spec.heads) == (
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
    )
    assert spec.kv_heads == config.num_key_value_heads
    assert spec.has_qkv_bias == family.startswith("qwen2")
    assert (("self_attn.q_norm", spec.head_dim) in spec.layer_norms) == (family in ("qwen3", "gemma3"))
    assert (spec.attention_scale == spec.head_dim**-0.5) == (family not in ("granite", "gemma3"))
    assert spec.has_tied_embeddings == (family in ("smollm2", "gemma3"))
    assert spec.rotary.kind == {"llama3": "llama3", "gemma3": "linear"}.get(family, "default")
    assert (spec.dtype, spec.context_length, spec.eos_token_ids) == (torch.float32, 512, (2,))


def test_what_old_folders_leave_out_has_its_usual_value(tmp_path):
    spec = read(tmp_path)
    assert (spec.kv_heads, spec.head_dim, spec.norm_epsilon, spec.rotary.theta) == (4, 16, 1e-6, 10_000.0)
    assert (spec.has_tied_embeddings, spec.dtype, spec.eos_token_ids) == (False, torch.float32, ())


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_the_precision_is_read_in_either_spelling(tmp_path, field):
    assert read(tmp_path, **{field: "bfloat16"}).dtype is torch.bfloat16


def test_ends_of_sequence_come_from_both_files(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert read(tmp_path, eos_token_id=5).eos_token_ids == (5, 7, 9)
    assert read(tmp_path, eos_token_id=[9, 5]).eos_token_ids == (9, 5, 7)


def windows(folder: Path, architecture: str, **fields: Any) -> tuple[int | None, ...]:
    return read(folder, architectures=[architecture], num_hidden_layers=4, sliding_window=128, **fields).windows


def test_a_window_hides_tokens_and_leaves_the_context_as_it_is(tmp_path):
    spec = read(tmp_path, architectures=["MistralForCausalLM"], sliding_window=128)
    assert (spec.context_length, spec.widest_window, set(spec.windows)) == (512, 128, {128})
    assert read(tmp_path, architectures=["MistralForCausalLM"], sliding_window=None).widest_window is None


def test_qwen_has_windows_from_a_layer_on_where_it_uses_them(tmp_path):
    assert windows(tmp_path, "Qwen2ForCausalLM", use_sliding_window=False) == ()
    assert windows(tmp_path, "Qwen2ForCausalLM", use_sliding_window=True) == (None,) * 4
    assert windows(tmp_path, "Qwen2ForCausalLM", use_sliding_window=True, max_window_layers=2) == (None, None, 128, 128)


def test_layer_types_go_before_the_familys_own_rule(tmp_path):
    types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    asked = {"use_sliding_window": True, "max_window_layers": 1, "layer_types": types}
    assert windows(tmp_path, "Qwen3ForCausalLM", **asked) == (128, None, 128, None)
    with pytest.raises(ModelError, match=r"'layer_types' must name .* for each of 4 layers"):
        windows(tmp_path, "Qwen3ForCausalLM", **{**asked, "layer_types": ["chunked_attention"] * 4})


def test_yarn_lengthens_the_context_and_other_scalings_leave_it(tmp_path):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert read(tmp_path, rope_scaling=yarn).context_length == 2048
    assert read(tmp_path, rope_scaling=yarn, max_position_embeddings=2048).context_length == 2048
    for kind in ("linear", "dynamic"):
        assert read(tmp_path, rope_scaling={"rope_type": kind, "factor": 4.0}).context_length == 512


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"no model folder at .*nowhere; give a folder in Hugging Face format"):
        read_spec(tmp_path / "nowhere")


def test_a_folder_without_config_is_no_model_folder(tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        read_spec(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1'])
def test_a_corrupt_config_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json .*download it again"):
        read_spec(tmp_path)


@pytest.mark.parametrize("architectures", [["GPT2LMHeadModel"], [], None, "LlamaForCausalLM"])
def test_another_architecture_is_refused_with_those_that_run(tmp_path, architectures):
    sentence = refusal(tmp_path, architectures=architectures)
    assert "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM" in sentence
    assert str(tmp_path / "config.json") in sentence


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"hidden_size": None}, "has no 'hidden_size'"),
        ({"vocab_size": "many"}, "'vocab_size' must be a whole number of at least 1, not 'many'"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' must be a whole number of at least 1, not 0"),
        ({"rms_norm_eps": -1}, "'rms_norm_eps' must be a finite number above 0, not -1"),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' must be true or false, not 'yes'"),
        ({"num_key_value_heads": 3}, "multiple of key-value heads"),
        ({"hidden_act": "gelu"}, "activation 'gelu'; Rota has only 'silu'"),
        ({"torch_dtype": "float64"}, "dtype 'float64'; Rota runs bfloat16, float16, float32"),
        ({"rope_scaling": 3}, "'rope_scaling' must be an object, not 3"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope scaling 'longrope', which Rota does not have"),
        ({"rope_scaling": {"rope_type": "linear"}}, "has no 'factor'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rotary parameters per kind of layer"),
        ({"partial_rotary_factor": 0.5}, "rotates only part of each head"),
        ({"eos_token_id": "</s>"}, "'eos_token_id' must be a token number"),
    ],
)
def test_what_the_config_says_wrongly_is_named(tmp_path, fields, part):
    assert part in refusal(tmp_path, **fields)


# Gemma 3's folders, in the spelling of old and of new ones.

GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 12,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "sliding_window": 512,
}


def test_every_sixth_layer_sees_all_tokens_unless_the_folder_says_otherwise(tmp_path):
    six = (512,) * 5 + (None,)
    assert read(tmp_path, **GEMMA).windows == six * 2
    assert read(tmp_path, **GEMMA, sliding_window_pattern=3).windows == ((512, 512, None) * 4)


def test_a_layer_without_a_window_keeps_every_block(tmp_path):
    assert read(tmp_path, **GEMMA).widest_window is None


def test_layers_with_a_window_have_their_own_rotary_base_in_either_spelling(tmp_path):
    old = read(
        tmp_path,
        **GEMMA,
        rope_theta=1e6,
        rope_local_base_freq=2e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    new = read(
        tmp_path,
        **GEMMA,
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
    spec = read(tmp_path, **GEMMA)
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
        read(tmp_path, **GEMMA, **fields)
