"""Loading a folder's weights: all of them, in the precision asked for, or none and a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from rota.core.errors import ModelError
from rota.engine.families.table import read_spec
from rota.engine.model.linear import Linear
from rota.engine.weights.finite import is_finite
from rota.engine.weights.load import Weights, dummy_weights, load_weights
from tests.engine.model_factory import make_tiny_model
from tests.engine.terminal import Terminal

CPU = torch.device("cpu")
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Weights:
    return load_weights(folder, read_spec(folder), CPU, dtype, quiet=True)


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as error:
        load(folder)
    return str(error.value)


def change_tensors(path: Path, **changes: torch.Tensor | None) -> None:
    """Write a safetensors file again, with some tensors replaced (None: left out); __ in a name is a dot."""
    tensors = load_file(path)
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, path)


@pytest.fixture
def single(tmp_path) -> Path:
    make_tiny_model(tmp_path, "llama2")
    return tmp_path


@pytest.fixture
def sharded(tmp_path) -> Path:
    make_tiny_model(tmp_path, "llama3")
    return tmp_path


def test_projections_of_the_same_input_are_stacked(tmp_path):
    state = make_tiny_model(tmp_path, "qwen2").state_dict()
    layer = load(tmp_path).layers[1]
    prefix = "model.layers.1"
    attention = [state[f"{prefix}.self_attn.{name}_proj.weight"] for name in "qkv"]
    biases = [state[f"{prefix}.self_attn.{name}_proj.bias"] for name in "qkv"]
    mlp = [state[f"{prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(layer.qkv.weight, torch.cat(attention))
    assert layer.qkv.bias is not None
    assert torch.equal(layer.qkv.bias, torch.cat(biases))
    assert torch.equal(layer.gate_up.weight, torch.cat(mlp))
    assert layer.down.bias is None
    assert layer.output.bias is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_converted_to_the_precision_asked_for(tmp_path, dtype):
    state = make_tiny_model(tmp_path, "smollm2").state_dict()
    weights = load(tmp_path, dtype)
    assert torch.equal(weights.embedding, state["model.embed_tokens.weight"].to(dtype))
    assert torch.equal(
        weights.layers[0].norms["post_attention_layernorm"],
        state["model.layers.0.post_attention_layernorm.weight"].to(dtype),
    )
    # A projection may lie in an order of its own; multiplying by one gives its columns away.
    down = state["model.layers.1.mlp.down_proj.weight"].to(dtype)
    unit = torch.eye(down.shape[1], dtype=dtype)
    assert torch.equal(weights.layers[1].down(unit), down.T)


def test_weights_outlive_their_files(tmp_path):
    state = make_tiny_model(tmp_path, "smollm2").state_dict()
    weights = load(tmp_path)
    with open(tmp_path / SINGLE, "r+b") as file:
        file.write(bytes((tmp_path / SINGLE).stat().st_size))
    assert torch.equal(weights.embedding, state["model.embed_tokens.weight"])


def test_tied_embeddings_are_held_once_in_float32(tmp_path):
    make_tiny_model(tmp_path, "smollm2")
    weights = load(tmp_path)
    assert isinstance(weights.head, Linear)
    assert weights.head.weight is weights.embedding
    parameters = sum(tensor.nbytes for tensor in load_file(tmp_path / SINGLE).values())
    assert weights.size_bytes == parameters


def test_a_terminal_shows_how_far_loading_has_come_unless_quiet(single, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    load_weights(single, read_spec(single), CPU, torch.float32, quiet=True)
    assert terminal.getvalue() == ""
    load_weights(single, read_spec(single), CPU, torch.float32, quiet=False)
    assert f"Loading {single.name}:   0%" in terminal.getvalue()


def test_a_log_holds_no_bar(single, capfd):
    load_weights(single, read_spec(single), CPU, torch.float32, quiet=False)
    assert "\r" not in capfd.readouterr().err


def test_a_folder_without_weights_says_what_it_wants(single):
    (single / SINGLE).unlink()
    sentence = refusal(single)
    assert SINGLE in sentence
    assert INDEX in sentence
    assert "--load-format dummy" in sentence


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, 0.999])
def test_a_truncated_file_is_named(single, keep):
    content = (single / SINGLE).read_bytes()
    (single / SINGLE).write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    sentence = refusal(single)
    assert str(single / SINGLE) in sentence
    assert "truncated or corrupt" in sentence


def test_a_truncated_last_shard_is_noticed_before_anything_is_loaded(sharded):
    last = sorted(sharded.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    assert str(last) in refusal(sharded)


def test_a_missing_shard_is_named(sharded):
    last = sorted(sharded.glob("*.safetensors"))[-1]
    last.unlink()
    assert f"{last} is missing" in refusal(sharded)


def test_a_tensor_the_index_forgot_is_named(sharded):
    index = json.loads((sharded / INDEX).read_text())
    del index["weight_map"]["model.layers.1.mlp.up_proj.weight"]
    (sharded / INDEX).write_text(json.dumps(index))
    assert "lacks the tensor 'model.layers.1.mlp.up_proj.weight'" in refusal(sharded)


def test_a_tensor_the_index_invents_is_named(sharded):
    index = json.loads((sharded / INDEX).read_text())["weight_map"]
    file = sharded / index["model.norm.weight"]
    change_tensors(file, model__norm__weight=None)
    assert f"{file} lacks the tensor 'model.norm.weight', which {INDEX} says is there" in refusal(sharded)


def test_a_corrupt_index_is_named(sharded):
    (sharded / INDEX).write_text("{")
    assert str(sharded / INDEX) in refusal(sharded)


def test_a_tensor_of_another_shape_is_named(single):
    change_tensors(single / SINGLE, model__layers__0__mlp__down_proj__weight=torch.zeros(64, 113))
    sentence = refusal(single)
    assert (
        "'model.layers.0.mlp.down_proj.weight' has the shape [64, 113], but config.json makes it [64, 112]" in sentence
    )


def test_a_precision_we_do_not_read_is_named(single):
    change_tensors(single / SINGLE, model__norm__weight=torch.zeros(64, dtype=torch.int8))
    assert "'model.norm.weight' is stored as I8; Rota reads F32, F16, BF16" in refusal(single)


def test_a_tensor_nobody_reads_is_refused(single):
    change_tensors(single / SINGLE, model__layers__0__self_attn__q_proj__bias=torch.zeros(64))
    assert "holds the tensor 'model.layers.0.self_attn.q_proj.bias'" in refusal(single)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
)
def test_weights_that_are_not_finite_are_refused_by_name(single, name, value):
    spoilt = load_file(single / SINGLE)[name]
    spoilt.view(-1)[-1] = value
    change_tensors(single / SINGLE, **{name: spoilt})
    assert f"{single / SINGLE}: the tensor '{name}' has values that are NaN or infinite" in refusal(single)


def test_a_weight_too_large_for_the_precision_is_refused_by_name(single):
    change_tensors(single / SINGLE, model__norm__weight=torch.full((64,), 1e5))
    load(single)
    with pytest.raises(ModelError, match=r"'model.norm.weight' has values too large for torch.float16; serve .* float"):
        load(single, torch.float16)


def test_stored_rotary_frequencies_are_passed_over(single):
    change_tensors(single / SINGLE, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(8))
    load(single)


def test_dummy_weights_repeat_and_keep_activations_finite(tmp_path):
    make_tiny_model(tmp_path, "qwen3")
    spec = read_spec(tmp_path)
    first, second = (dummy_weights(spec, CPU, torch.float32) for _ in range(2))
    other = dummy_weights(spec, CPU, torch.float32, seed=1)
    assert torch.equal(first.layers[1].qkv.weight, second.layers[1].qkv.weight)
    assert not torch.equal(first.layers[1].qkv.weight, other.layers[1].qkv.weight)
    spread = first.layers[0].gate_up(torch.randn(8, spec.hidden_size)).std()
    assert 0.5 < float(spread) < 2.0


# Numbers are finite if torch says so, whatever their bits.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_sixteen_bits_counts_as_torch_counts_it(dtype):
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    assert is_finite(every[every.isfinite()])
    among_others = torch.zeros(int((~every.isfinite()).sum()), 3, dtype=dtype)
    among_others[:, 1] = every[~every.isfinite()]
    assert not any(is_finite(row) for row in among_others)


@given(st.lists(st.floats(width=32), min_size=1, max_size=9))
def test_so_does_every_float(numbers: list[float]):
    values = torch.tensor(numbers, dtype=torch.float32)
    assert is_finite(values) == bool(values.isfinite().all())
    assert is_finite(values.repeat(4, 1)[:, ::2]) == bool(values[::2].isfinite().all())
