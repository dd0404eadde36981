"""What we stack is what PEFT would add, and what we cannot serve is refused with its reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import Linear
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from rota.core.errors import AdapterError
from rota.engine.lora.files.checkpoint import read_checkpoint
from rota.engine.lora.host import HostAdapter, StackedSite, stacked_sites
from rota.engine.model.sites import module_name, module_names, site_shapes
from rota.engine.model.spec import ModelSpec
from tests.engine.lora.adapter_factory import (
    ATTENTION,
    EVERYTHING,
    change_config,
    change_dtype,
    change_tensors,
    load_with_peft,
    make_adapter,
)

Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Q_B = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rank 1": {"r": 1, "lora_alpha": 16},
    "rank-stabilised": {"r": 7, "use_rslora": True, "target_modules": "all-linear"},
    "attention only": {"target_modules": ATTENTION},
    "odd parts": {"target_modules": ["k_proj", "up_proj"]},
    "an expression": {"target_modules": r".*\.layers\.\d\.(self_attn\.[qo]|mlp\.down)_proj"},
    "one layer": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "one layer, by number": {"layers_to_transform": 0, "target_modules": ["v_proj", "o_proj"]},
    "a whole name": {"target_modules": ["model.layers.1.mlp.up_proj", "0.mlp.gate_proj"]},
    "a whole name beside one layer": {
        "target_modules": ["model.layers.1.mlp.up_proj", "q_proj"],
        "layers_to_transform": [0],
    },
    "an exception": {"target_modules": "all-linear", "exclude_modules": ["k_proj", "layers.0.mlp.down_proj"]},
    "patterns": {
        # The first that fits counts, and PEFT saves them sorted.
        "rank_pattern": {"[gu].*_proj": 3, "model.layers.1.mlp.down_proj": 8, "q_proj": 2, "up_proj": 5},
        "alpha_pattern": {r"layers\.0\.self_attn\.\w_proj": 32, "^model.layers.1.mlp.down_proj": 1.5},
    },
    "rank-stabilised with patterns": {
        "use_rslora": True,
        "rank_pattern": {"_proj": 1, "self_attn.v_proj": 9},
        "alpha_pattern": {"down_proj": 5},
    },
}


def sites_of(adapter: HostAdapter, spec: ModelSpec) -> list[StackedSite]:
    return stacked_sites(adapter.pieces[0], site_shapes(spec), spec.layers, adapter.site_ranks)


def deltas(adapter: HostAdapter, spec: ModelSpec) -> dict[str, Tensor]:
    """B A of every module, from the stacked factors."""
    found = {}
    for shape, site in zip(site_shapes(spec), sites_of(adapter, spec), strict=True):
        for layer in range(spec.layers):
            columns = torch.split(site.b[layer], shape.widths, dim=1)
            for position, (part, _) in enumerate(shape.parts):
                found[module_name(layer, part)] = columns[position].T @ site.a[layer, position]
    return found


def assert_adds_what_peft_adds(folder: Path, model: PreTrainedModel, spec: ModelSpec) -> None:
    peft_model = load_with_peft(folder, model).get_base_model()
    found = deltas(read_checkpoint(folder, spec, torch.float32, max_rank=16), spec)
    touched = 0
    for name in module_names(spec.layers):
        module = peft_model.get_submodule(name)
        if isinstance(module, Linear):
            torch.testing.assert_close(found[name], module.get_delta_weight("default"), rtol=1e-5, atol=1e-6)
            touched += 1
        else:
            assert not found[name].any(), f"{name} is none of the adapter's"
    assert touched


@pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match")
@pytest.mark.parametrize("kind", KINDS)
def test_every_module_gets_the_delta_that_peft_gives_it(kind, model, spec, tmp_path):
    make_adapter(tmp_path, model, **KINDS[kind])

    assert_adds_what_peft_adds(tmp_path, model, spec)


def test_the_rank_of_a_site_is_its_largest_part_and_nought_where_it_is_left_alone(model, spec, tmp_path):
    rank_pattern = {"layers.1.self_attn.v_proj": 2, "v_proj": 9}
    make_adapter(tmp_path, model, target_modules=ATTENTION, rank_pattern=rank_pattern)

    adapter = read_checkpoint(tmp_path, spec, torch.float32, max_rank=16)

    assert adapter.ranks.tolist() == [[9, 4, 0, 0], [4, 4, 0, 0]]
    assert adapter.site_ranks == (9, 4, 0, 0)


@pytest.mark.usefixtures("model")
def test_a_checkpoint_that_keeps_the_adapters_name_in_its_keys_is_the_same(spec, folder):
    plain = read_checkpoint(folder, spec, torch.float32, max_rank=16)
    change_tensors(folder, lambda tensors: rename(tensors, ".weight", ".default.weight"))

    assert torch.equal(read_checkpoint(folder, spec, torch.float32, max_rank=16).pieces[0], plain.pieces[0])


def test_a_checkpoint_in_several_files_is_the_same(spec, folder):
    plain = read_checkpoint(folder, spec, torch.float32, max_rank=16)
    shard(folder)

    assert torch.equal(read_checkpoint(folder, spec, torch.float32, max_rank=16).pieces[0], plain.pieces[0])


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
def test_the_scale_is_folded_in_before_rounding(stored, spec, folder):
    change_config(folder, lora_alpha=0.3)
    change_dtype(folder, stored)
    b = load_file(folder / "adapter_model.safetensors")[Q_B]

    adapter = read_checkpoint(folder, spec, torch.bfloat16, max_rank=16)

    assert torch.equal(sites_of(adapter, spec)[0].b[0, :, : len(b)], (b.float() * (0.3 / 4)).bfloat16().T)


def test_a_config_that_names_no_targets_means_what_is_in_the_file(spec, folder):
    change_config(folder, target_modules=None)

    assert read_checkpoint(folder, spec, torch.float32, max_rank=16).site_ranks == (4, 4, 4, 4)


def rename(tensors: dict[str, Tensor], old: str, new: str) -> None:
    for name in list(tensors):
        tensors[name.replace(old, new)] = tensors.pop(name)


def shard(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    places = {}
    for number in (0, 1):
        name = f"adapter_model-{number}.safetensors"
        part = {key: tensor for at, (key, tensor) in enumerate(tensors.items()) if at % 2 == number}
        save_file(part, folder / name)
        places |= dict.fromkeys(part, name)
    (folder / "adapter_model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def refusal(folder: Path | str, spec: ModelSpec, **arguments: Any) -> str:
    with pytest.raises(AdapterError) as error:
        read_checkpoint(folder, spec, arguments.pop("dtype", torch.float32), arguments.pop("max_rank", 16), **arguments)
    return str(error.value)


CONFIG_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "DoRA without magnitudes": (
        {"use_dora": True},
        "lacks the lora_magnitude_vector of 'model.layers.0.mlp.down_proj', though adapter_config.json sets 'use_dora'",
    ),
    "DoRA with biases of factors": ({"use_dora": True, "lora_bias": True}, "both 'use_dora' and 'lora_bias'"),
    "a flag of no kind": ({"use_dora": "yes"}, "'use_dora' must be true or false, not 'yes'"),
    "another type": ({"peft_type": "LOHA"}, "describes a PEFT adapter of type 'LOHA'; Rota serves only 'LORA'"),
    "biases of no kind": ({"bias": "some"}, "sets 'bias' to 'some'; PEFT knows none, lora_only, all"),
    "factor biases that are not there": ({"lora_bias": True}, "lacks the lora_B.bias of"),
    "saved modules": (
        {"modules_to_save": ["lm_head"]},
        "lacks the weight of 'lm_head', which adapter_config.json names in 'modules_to_save'",
    ),
    "a base in few bits of its own": ({"init_lora_weights": "loftq"}, "and PEFT cannot convert that"),
    "a start of a later release": ({"init_lora_weights": "sunrise"}, "to 'sunrise', which Rota does not know"),
    "a field of a later release": ({"use_sunrise": [1]}, "sets 'use_sunrise' to [1], a field that Rota does not know"),
    "moved base": ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
    "an embedding that is not there": (
        {"target_modules": [*EVERYTHING, "embed_tokens"]},
        "lacks the factors of 'model.embed_tokens', which adapter_config.json targets",
    ),
    "unknown module": ({"target_modules": [*EVERYTHING, "c_attn"]}, "targets 'c_attn', which names no module"),
    "unknown expression": ({"target_modules": "c_.*"}, "targets 'c_.*', which names no module"),
    "a layer beyond the last": (
        {"layers_to_transform": [5]},
        "'layers_to_transform' names layer 5, but this model has 2 layers",
    ),
    "fewer targets than factors": (
        {"target_modules": ATTENTION},
        "has factors for 'model.layers.0.mlp.down_proj', which adapter_config.json does not target",
    ),
    "another rank": ({"r": 3}, "has the shape [4, 112], but adapter_config.json gives it rank 3"),
    "no rank": ({"r": "four"}, "'r' must be a whole number of at least 1, not 'four'"),
    "infinite scale": ({"lora_alpha": float("inf")}, "cannot be read (Infinity is no number of JSON)"),
    "no expression": ({"rank_pattern": {"(": 3}}, "'(' is no regular expression"),
    "targets of no kind": ({"target_modules": [1]}, "'target_modules' must be a text or a list of texts"),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_a_config_we_cannot_serve_is_refused_with_its_file_and_reason(fault, spec, folder):
    fields, sentence = CONFIG_FAULTS[fault]
    change_config(folder, **fields)

    reason = refusal(folder, spec)

    assert sentence in reason
    assert str(folder) in reason


TENSOR_FAULTS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "no partner": (lambda t: t.pop(Q_B), "'model.layers.0.self_attn.q_proj' has a lora_A without its lora_B"),
    "no pair": (lambda t: (t.pop(Q_A), t.pop(Q_B)), "lacks the factors of 'model.layers.0.self_attn.q_proj'"),
    "nothing": (lambda t: t.clear(), "holds no LoRA factors"),
    "wrong inputs": (
        lambda t: t.update({Q_A: torch.zeros(4, 63)}),
        "has the shape [4, 63], but this model's q_proj has 64 inputs; the adapter was made for another model",
    ),
    "wrong outputs": (
        lambda t: t.update({Q_B: torch.zeros(999, 4)}),
        "has the shape [999, 4], but this model's q_proj has 128 outputs",
    ),
    "wrong dimensions": (lambda t: t.update({Q_A: torch.zeros(256)}), "has the shape [256], but"),
    "not a number": (lambda t: t[Q_A][0, 0].fill_(torch.nan), f"'{Q_A}' has values that are NaN or infinite"),
    "infinite": (lambda t: t[Q_B][0, 0].fill_(torch.inf), f"'{Q_B}' has values that are NaN or infinite"),
    "integers": (lambda t: t.update({Q_A: torch.zeros(4, 64).int()}), "is stored as I32; Rota reads F32, F16, BF16"),
    "another layer": (
        lambda t: rename(t, "layers.1.", "layers.7."),
        "has factors for 'model.layers.7.mlp.down_proj', which this model does not have; its 2 layers have q_proj",
    ),
    "magnitudes": (
        lambda t: t.update({Q_A.replace("lora_A.weight", "lora_magnitude_vector"): torch.ones(4)}),
        "lora_magnitude_vector', but adapter_config.json does not set 'use_dora'",
    ),
    "a head": (
        lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(4)}),
        "a whole matrix, but adapter_config.json does not name it in 'modules_to_save'",
    ),
    "factors of the head": (
        lambda t: rename(t, "model.layers.0.mlp.up_proj", "lm_head"),
        "has factors for 'lm_head', which adapter_config.json does not target",
    ),
    "a bias of a factor": (
        lambda t: t.update({Q_B.replace("weight", "bias"): torch.ones(4)}),
        "lora_B.bias', but adapter_config.json does not set 'lora_bias'",
    ),
    "a bias": (
        lambda t: t.update({Q_A.replace("lora_A.weight", "base_layer.bias"): torch.ones(4)}),
        "q_proj.base_layer.bias', but this model has no bias there",
    ),
    "a stranger": (lambda t: t.update({"score.weight": torch.ones(4)}), "'score.weight': it is no LoRA factor"),
    "two adapters": (
        lambda t: t.update({Q_A.replace("weight", "other.weight"): torch.zeros(4, 64)}),
        "is there twice, in two spellings or two files",
    ),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_weights_we_cannot_serve_are_refused_with_their_file_and_reason(fault, spec, folder):
    change, sentence = TENSOR_FAULTS[fault]
    change_tensors(folder, change)

    reason = refusal(folder, spec)

    assert sentence in reason
    assert str(folder) in reason


def test_a_rank_over_the_limit_is_refused_with_both(spec, model, tmp_path):
    make_adapter(tmp_path, model, rank_pattern={"v_proj": 9})

    reason = refusal(tmp_path, spec, max_rank=8)

    assert f"{tmp_path / 'adapter_config.json'} gives 'model.layers.0.self_attn.v_proj' rank 9" in reason
    assert "over the limit of 8 that slots were made for; start the server with --max-lora-rank 9, or" in reason


def test_weights_that_overflow_the_models_precision_are_refused(spec, folder):
    change_tensors(folder, lambda tensors: tensors[Q_B].mul_(1e6))

    assert "has weights too large for torch.float16" in refusal(folder, spec, dtype=torch.float16)


def test_missing_files_are_named(spec, folder):
    assert refusal(folder / "nowhere", spec) == f"There is no adapter folder at {folder / 'nowhere'}."
    assert refusal("a\0b", spec).startswith("'a\\x00b' is no path")

    weights = folder / "adapter_model.safetensors"
    weights.rename(folder / "adapter_model.bin")
    assert "holds pickled weights" in refusal(folder, spec)
    assert "safetensors.torch.save_file(torch.load(" in refusal(folder, spec)
    (folder / "adapter_model.bin").unlink()
    assert "has neither adapter_model.safetensors nor" in refusal(folder, spec)
    (folder / "adapter_config.json").unlink()
    assert "is not an adapter folder: it has no adapter_config.json" in refusal(folder, spec)


def test_a_missing_shard_is_named(spec, folder):
    shard(folder)
    (folder / "adapter_model-1.safetensors").unlink()

    assert f"{folder / 'adapter_model-1.safetensors'} is missing" in refusal(folder, spec)


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00\xff"])
def test_a_corrupt_config_is_refused(text, spec, folder):
    (folder / "adapter_config.json").write_text(text)

    assert str(folder / "adapter_config.json") in refusal(folder, spec)


def test_a_file_cut_anywhere_or_scrambled_is_refused(spec, folder):
    path = folder / "adapter_model.safetensors"
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    spoilt = [whole[:end] for end in (0, 5, 8, header // 2, header, len(whole) - 1)]
    spoilt += [b"\xff" * 8 + whole[8:], whole[:8] + b"[" + whole[9:], whole.replace(b'"shape":[', b'"shape":[9', 1)]
    spoilt += [whole.replace(b'"dtype"', b'"dtipe"', 1), whole.replace(b'"data_offsets":[', b'"data_offsets":[-', 1)]
    for raw in spoilt:
        path.write_bytes(raw)
        assert f"{path} is truncated or corrupt" in refusal(folder, spec)


def test_only_folders_and_files_inside_the_root_are_read(spec, folder, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    inside = root / "mine"
    folder.rename(inside)
    outside = tmp_path / "outside"

    for path in ("mine", str(inside), "../root/mine"):
        read_checkpoint(path, spec, torch.float32, 16, adapter_root=root)

    inside.rename(outside)
    (root / "link").symlink_to(outside)
    for path in ("../outside", str(outside), "link"):
        reason = refusal(path, spec, adapter_root=root)
        assert reason == f"{root / path} leads outside the adapter root {root}."

    inside.mkdir()
    (inside / "adapter_config.json").write_text((outside / "adapter_config.json").read_text())
    (inside / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    assert "outside the adapter root" in refusal("mine", spec, adapter_root=root)
    (inside / "adapter_model.safetensors").unlink()
    index = {"weight_map": {Q_A: "../../outside/adapter_model.safetensors"}}
    (inside / "adapter_model.safetensors.index.json").write_text(json.dumps(index))
    assert "outside the adapter root" in refusal("mine", spec, adapter_root=root)
