"""A layout in few bits is read as its writer meant it, or refused with a sentence before anything is read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rota.core.errors import ModelError
from rota.engine.families.table import read_spec
from rota.engine.quantised.maker import MatrixMaker
from rota.engine.weights.layouts.layout import StoredTensors, window_of
from rota.engine.weights.layouts.table import read_layout
from rota.engine.weights.load import load_weights
from rota.engine.weights.makers import EightBitFloats, FourBitCodes
from rota.engine.weights.shards import Shards
from tests.engine.weights.writers import AWQ, GPTQ, LAYOUTS, SINGLE, change_config, floats, ints, write_model

CPU = torch.device("cpu")
SITES = {
    "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "output": ["self_attn.o_proj"],
    "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "down": ["mlp.down_proj"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_read_as_its_writer_meant_it(tmp_path, layout):
    state = write_model(tmp_path, layout, "qwen2").state_dict()
    weights = load_weights(tmp_path, read_spec(tmp_path), CPU, torch.float32, quiet=True)

    prefix = "model.layers.1"
    for site, parts in SITES.items():
        expected = torch.cat([state[f"{prefix}.{part}.weight"] for part in parts])
        torch.testing.assert_close(getattr(weights.layers[1], site).weight, expected, atol=1e-6, rtol=1e-6)
    assert torch.equal(weights.layers[1].qkv.bias[:64], state[f"{prefix}.self_attn.q_proj.bias"])


# formats.safetensors holds a random matrix as AutoAWQ 0.2.9, AutoGPTQ 0.7.1 and compressed-tensors 0.20.0 packed it,
# and under `meant` what they unpacked from that. The libraries were used once, and are not needed here.

OUTPUTS, INPUTS = 32, 64
SECTIONS: dict[str, dict[str, Any]] = {
    "awq": AWQ,
    "gptq": GPTQ,
    "gptq_order": {**GPTQ, "desc_act": True},
    "packed": ints(),
    "packed_zeros": ints(symmetric=False),
    "floats": floats("channel"),
}


@pytest.mark.parametrize("name", SECTIONS)
def test_a_matrix_is_read_as_its_writer_s_library_reads_it(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    change_config(tmp_path, quantization_config=SECTIONS[name])
    shutil.copy(Path(__file__).with_name("formats.safetensors"), tmp_path / SINGLE)
    layout = read_layout(tmp_path)
    assert layout is not None

    with Shards(tmp_path) as shards:
        tensors = StoredTensors(shards, name, torch.device("cpu"))
        for rule in layout.rules(OUTPUTS, INPUTS):
            shards.check_form(f"{name}.{rule.suffix}", rule.shapes, rule.kinds)
        read = layout.read(tensors, window_of(None, OUTPUTS, INPUTS))
        torch.testing.assert_close(read.weights(), shards.read(f"{name}.meant"), atol=1e-6, rtol=1e-6)


# What cannot be read is refused.

MODULE = "model.layers.1.mlp.up_proj"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
SCHEME = floats("channel")["config_groups"]["group_0"]


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"bits": 4}, "quantised by no method, which Rota does not read; it reads compressed-tensors, fp8, awq, gptq"),
        (
            {"quant_method": "bitsandbytes"},
            "quantised by bitsandbytes, .*the plain model with --quantization fp8",
        ),
        ({"quant_method": "mxfp4"}, "quantised by mxfp4, .* Serve an AWQ or GPTQ version"),
        ({"quant_method": "eetq"}, "quantised by eetq, .* Serve the plain model, or an FP8, AWQ or GPTQ version"),
        ({**AWQ, "bits": 3}, "AWQ weights in 3 bits, which Rota does not read; it reads those in four bits"),
        ({**AWQ, "version": "gemv"}, "AWQ weights of the version 'gemv', .* it reads the version 'gemm'"),
        ({**AWQ, "zero_point": False}, "AWQ weights without zeros"),
        ({**AWQ, "group_size": 0}, "'group_size' must be a whole number of at least 1, not 0"),
        ({**AWQ, "modules_to_not_convert": "lm_head"}, "'modules_to_not_convert' must be a list of module names"),
        ({**GPTQ, "bits": 8}, "GPTQ weights in 8 bits, .* it reads those in four bits"),
        ({**GPTQ, "bits": None}, "has no 'bits'"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "GPTQ weights in another packing .'checkpoint_format' is 'marlin'."),
        ({**GPTQ, "is_marlin_format": True}, "GPTQ weights packed for Marlin"),
        ({**GPTQ, "lm_head": True}, "a head in GPTQ's four bits"),
        ({**GPTQ, "dynamic": {"-:.*down.*": {}}}, "GPTQ weights that differ by module"),
        ({**GPTQ, "desc_act": "yes"}, "'desc_act' must be true or false, not 'yes'"),
        ({**FP8, "fmt": "e5m2"}, "FP8 weights in another format .'fmt' is 'e5m2'.*it reads E4M3"),
        ({**FP8, "activation_scheme": "token"}, "FP8 activations of another scheme"),
        ({**FP8, "weight_block_size": [128]}, "'weight_block_size' must be two whole numbers, not"),
        ({**FP8, "weight_block_size": [8, 8], "activation_scheme": "static"}, "blocks with static activations"),
        ({**floats("channel"), "format": "int-quantized"}, "compressed-tensors weights of the format 'int-quantized'"),
        (
            {**floats("channel"), "format": "nvfp4-pack-quantized"},
            "format .nvfp4-pack-quantized., .* it reads .float",
        ),
        ({**floats("channel"), "format": "marlin-24"}, "of the format 'marlin-24'"),
        (floats("tensor_group"), "'strategy' is 'tensor_group'"),
        (floats("channel", num_bits=4), "'num_bits' is 4"),
        (ints(num_bits=8), "'num_bits' is 8.*it reads 'float-quantized' in eight bits and 'pack-quantized' in four"),
        (ints(type="float"), "'type' is 'float'"),
        ({**ints(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "with a 'sparsity_config'"),
        ({**ints(), "transform_config": {"config_groups": {"R1": {}}}}, "with a 'transform_config'"),
        ({**ints(), "kv_cache_scheme": {"num_bits": 8}}, "'kv_cache_scheme', .*--kv-cache-dtype fp8 needs no stored"),
        ({**ints(), "ignore": ["re:("]}, "'ignore' has the expression 're:.', which is wrong"),
        ({**ints(), "config_groups": {"a": SCHEME, "b": SCHEME}}, "compressed-tensors weights in 2 forms"),
    ],
)
def test_what_rota_does_not_read_is_refused_with_the_nearest_that_it_does(tmp_path, section, sentence):
    (tmp_path / "config.json").write_text("{}")
    change_config(tmp_path, quantization_config=section)
    with pytest.raises(ModelError, match=sentence) as error:
        read_layout(tmp_path)
    assert str(tmp_path / "config.json") in str(error.value)


def test_int8_activations_are_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    rounding = {"num_bits": 8, "type": "int", "dynamic": True}
    for section, sentence in ((ints(), "rounded activations"), (floats("channel"), "'type' is 'int'")):
        section["config_groups"]["group_0"]["input_activations"] = rounding
        change_config(tmp_path, quantization_config=section)
        with pytest.raises(ModelError, match=sentence):
            read_layout(tmp_path)


def makers(folder: Path) -> list[MatrixMaker | None]:
    layout = read_layout(folder)
    assert layout is not None
    eight, four = EightBitFloats(layout.holds), FourBitCodes(layout.holds, layout.group_size, torch.float32)
    return [None, eight if layout.bits == 8 else four]


def with_value(value: float) -> Any:
    def spoil(tensor: Tensor) -> Tensor:
        spoilt = tensor.clone()
        spoilt.view(-1)[-1] = value
        return spoilt

    return spoil


def without(_tensor: Tensor) -> None:
    """The tensor is left out."""


NAN, INFINITY, ZERO, MINUS = (with_value(value) for value in (torch.nan, torch.inf, 0.0, -1.0))
NOT_FINITE = "has values that are NaN or infinite"


@pytest.mark.parametrize(
    ("layout", "suffix", "spoil", "sentence"),
    [
        ("8: AutoFP8", "weight_scale", without, "lacks the tensor '{name}'"),
        ("8: AutoFP8", "weight_scale", NAN, NOT_FINITE),
        ("8: AutoFP8", "weight_scale", ZERO, "has the value 0.0, but a scale is above zero"),
        ("8: AutoFP8", "weight", NAN, NOT_FINITE),
        ("8: AutoFP8", "weight", lambda one: one.to(torch.float8_e5m2), "is stored as F8_E5M2; Rota reads F8_E4M3"),
        ("8: AutoFP8", "weight", lambda one: one.half(), "is stored as F16; Rota reads F8_E4M3"),
        ("8: AutoFP8, static", "input_scale", without, "lacks the tensor '{name}'"),
        ("8: AutoFP8, static", "input_scale", INFINITY, NOT_FINITE),
        ("8: compressed-tensors, channels", "weight_scale", MINUS, "has the value -1.0, but a scale is above zero"),
        ("8: compressed-tensors, channels", "weight_scale", lambda one: one[1:], "has the shape [127, 1], but"),
        (
            "8: fine-grained",
            "weight_scale_inv",
            lambda one: one.T,
            "has the shape [2, 3], but config.json makes",
        ),
        ("8: fine-grained", "weight_scale_inv", INFINITY, NOT_FINITE),
        ("4: AWQ", "scales", NAN, NOT_FINITE),
        ("4: AWQ", "qzeros", without, "lacks the tensor '{name}'"),
        ("4: AWQ", "qweight", lambda one: one.T, "has the shape [16, 64], but config.json makes it [64, 16]"),
        ("4: GPTQ", "g_idx", without, "lacks the tensor '{name}'"),
        ("4: GPTQ", "g_idx", lambda one: one + 1, "names groups that are not among the 2 of the matrix"),
        ("4: GPTQ", "scales", INFINITY, NOT_FINITE),
        ("4: GPTQ", "qweight", lambda one: one.long(), "is stored as I64; Rota reads I32"),
        ("4: compressed-tensors", "weight_scale", NAN, NOT_FINITE),
        ("4: compressed-tensors", "weight_shape", lambda one: one + 8, "says [136, 72], which is not the shape"),
        ("4: compressed-tensors, with zeros", "weight_zero_point", without, "lacks the tensor '{name}'"),
    ],
)
def test_a_tensor_that_is_missing_or_wrong_is_named_with_its_file(tmp_path, layout, suffix, spoil, sentence):
    write_model(tmp_path, layout)
    name, tensors = f"{MODULE}.{suffix}", load_file(tmp_path / SINGLE)
    spoilt = spoil(tensors.pop(name))
    save_file({**tensors, **({} if spoilt is None else {name: spoilt.contiguous()})}, tmp_path / SINGLE)

    for maker in makers(tmp_path):
        with pytest.raises(ModelError) as error:
            load_weights(tmp_path, read_spec(tmp_path), torch.device("cpu"), torch.float32, True, maker=maker)
        assert sentence.format(name=name) in str(error.value)
        assert name in str(error.value)
        assert str(tmp_path if spoilt is None else tmp_path / SINGLE) in str(error.value)


def test_a_tensor_that_the_layout_does_not_have_is_refused(tmp_path):
    write_model(tmp_path, "8: AutoFP8")
    tensors = load_file(tmp_path / SINGLE)
    save_file({**tensors, f"{MODULE}.input_scale": torch.tensor(1.0)}, tmp_path / SINGLE)
    with pytest.raises(ModelError, match=f"holds the tensor '{MODULE}.input_scale', which"):
        load_weights(tmp_path, read_spec(tmp_path), torch.device("cpu"), torch.float32, True)


def test_biases_of_zeros_that_old_gptq_folders_have_are_passed_over_and_others_are_not(tmp_path):
    write_model(tmp_path, "4: GPTQ")
    tensors, spec = load_file(tmp_path / SINGLE), read_spec(tmp_path)
    save_file({**tensors, f"{MODULE}.bias": torch.zeros(128).half()}, tmp_path / SINGLE)
    load_weights(tmp_path, spec, torch.device("cpu"), torch.float32, True)
    save_file({**tensors, f"{MODULE}.bias": torch.ones(128).half()}, tmp_path / SINGLE)
    with pytest.raises(ModelError, match=f"holds the tensor '{MODULE}.bias', which"):
        load_weights(tmp_path, spec, torch.device("cpu"), torch.float32, True)
