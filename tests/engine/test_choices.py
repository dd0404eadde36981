"""What is asked, the folder and the device go in; precision, form of the weights and size come out, or a sentence."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rota.core.config import EngineConfig, ModelConfig
from rota.core.errors import ConfigError
from rota.engine import choices
from rota.engine.choices import can_compute, choose, choose_dtype, choose_maker, choose_quantization
from rota.engine.cpu import Processor
from rota.engine.device import DeviceMemory
from rota.engine.quantised.maker import MatrixMaker
from rota.engine.quantised.matrices import FourBit, GroupsFile
from rota.engine.weights.layouts.awq_gptq import AwqLayout
from rota.engine.weights.layouts.fp8 import Float8Layout
from rota.engine.weights.load import weight_bytes
from rota.engine.weights.makers import EightBitFloats, FourBitCodes, FourBitGroups
from tests.engine.lora.small_bank import LLAMA_8B
from tests.engine.model_factory import make_tiny_model

CPU, GPU = torch.device("cpu"), torch.device("cuda")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

AMX = Processor(frozenset({BF16, FP16}), "weight-only")
AVX512_BF16 = Processor(frozenset({BF16}), "weight-only")
AVX512 = Processor(frozenset(), "weight-only")
AVX2 = Processor(frozenset(), "weight-only")
OLD_X86 = Processor(frozenset(), None)
NEOVERSE_N1 = Processor(frozenset(), "dynamic")
HALVES_ONLY = Processor(frozenset({FP16}), "dynamic")  # as ARM's before bfloat16
NEOVERSE_V1 = Processor(frozenset({BF16, FP16}), "dynamic")
OLD_ARM = Processor(frozenset(), None)


@pytest.mark.parametrize(
    ("processor", "folder", "chosen"),
    [
        (AMX, BF16, BF16),
        (AMX, FP16, FP16),
        (AMX, FP32, FP32),
        (AVX512_BF16, BF16, BF16),
        (AVX512_BF16, FP16, BF16),
        (AVX512, BF16, FP32),
        (AVX512, FP16, FP32),
        (AVX2, BF16, FP32),
        (OLD_X86, BF16, FP32),
        (NEOVERSE_N1, BF16, FP32),
        (NEOVERSE_N1, FP16, FP32),
        (HALVES_ONLY, BF16, FP32),  # float16 has not the range
        (HALVES_ONLY, FP16, FP16),
        (NEOVERSE_V1, BF16, BF16),
        (OLD_ARM, FP32, FP32),
    ],
)
def test_auto_takes_the_folder_s_precision_or_the_nearest_that_the_processor_multiplies(processor, folder, chosen):
    assert choose_dtype(ModelConfig(), folder, CPU, processor) is chosen


@pytest.mark.parametrize(
    ("processor", "has_groups", "asked", "dtype", "chosen"),
    [
        (AMX, True, "auto", "auto", "weight-only"),
        (AVX2, True, "auto", "auto", "weight-only"),
        (NEOVERSE_N1, True, "auto", "auto", "dynamic"),
        (OLD_X86, True, "auto", "auto", None),
        (OLD_ARM, True, "auto", "auto", None),
        # Rounded weights are not what an exact precision is asked for.
        (AMX, True, "auto", "float32", None),
        (NEOVERSE_N1, True, "auto", "float32", None),
        # The weights of others are rounded only when asked.
        (AMX, False, "auto", "auto", None),
        (NEOVERSE_N1, False, "auto", "auto", None),
        (AMX, False, "int4", "auto", "weight-only"),
        (NEOVERSE_N1, False, "int4", "float32", "dynamic"),
        (AMX, True, "none", "auto", None),
    ],
)
def test_four_bits_are_taken_where_they_were_there_before_or_asked_for(processor, has_groups, asked, dtype, chosen):
    config = ModelConfig(quantization=asked, dtype=dtype)
    assert choose_quantization(config, has_groups, CPU, processor) == chosen


def test_a_gpu_takes_no_four_bits_and_refuses_them():
    assert choose_quantization(ModelConfig(), True, GPU, AMX) is None
    with pytest.raises(ConfigError, match=r"runs on the cuda.*Use --quantization none"):
        choose_quantization(ModelConfig(quantization="int4"), False, GPU, AMX)


def test_a_processor_without_a_quick_product_refuses_four_bits():
    with pytest.raises(ConfigError, match=r"needs AVX2, AVX-512 or ARM's dot product.*Use --quantization none"):
        choose_quantization(ModelConfig(quantization="int4"), True, CPU, OLD_X86)


@pytest.fixture
def onednn_comes_back():
    yield
    torch._C._set_mkldnn_enabled(True)


@pytest.mark.usefixtures("onednn_comes_back")
def test_a_precision_that_was_asked_for_is_obeyed_with_a_line_that_says_what_it_costs(caplog):
    with caplog.at_level(logging.WARNING, "rota.engine"):
        assert choose_dtype(ModelConfig(dtype="bfloat16"), BF16, CPU, NEOVERSE_N1) is BF16
    (line,) = [record.getMessage() for record in caplog.records]
    assert "has no arithmetic: a product takes" in line
    assert "times as long as in float32" in line


@pytest.mark.parametrize("asked", ["bfloat16", "float32"])
def test_what_the_processor_multiplies_is_taken_without_a_word(caplog, asked):
    with caplog.at_level(logging.DEBUG, "rota.engine"):
        choose_dtype(ModelConfig(dtype=asked), FP32, CPU, AVX512_BF16)
    assert not caplog.records


def test_a_precision_the_device_cannot_do_is_refused_with_those_it_can():
    with pytest.raises(ConfigError, match=r"'float16', which this cpu cannot.*one of float32"):
        choose_dtype(ModelConfig(dtype="float16"), FP32, CPU, AVX2, lambda dtype: dtype is FP32)


@pytest.mark.parametrize(
    ("able", "folder", "chosen"), [({BF16, FP16}, BF16, BF16), ({FP16}, BF16, FP16), (set(), FP16, FP32)]
)
def test_a_gpu_takes_the_folder_s_precision_or_the_nearest_it_computes(able, folder, chosen):
    assert choose_dtype(ModelConfig(), folder, GPU, OLD_X86, able.__contains__) is chosen


def test_a_device_is_asked_and_not_assumed_to_compute_a_precision():
    assert can_compute(FP32, CPU)
    assert not can_compute(torch.int8, CPU)


# A maker of matrices in few bits.

ARM, OLD = Processor(frozenset(), "dynamic"), Processor(frozenset(), None)
NO_GPU, AMPERE, ADA, HOPPER = None, (8, 0), (8, 9), (9, 0)
FOLDERS = {
    "plain": None,
    "FP8": Float8Layout(method="FP8", holds=lambda _: True),
    "AWQ": AwqLayout(holds=lambda _: True, group_size=128),
}


def chosen_maker(tmp_path, folder, asked, capability, processor=ARM, dtype="auto") -> MatrixMaker | None:
    config = ModelConfig(quantization=asked, dtype=dtype)
    return choose_maker(config, FOLDERS[folder], GroupsFile(tmp_path), torch.bfloat16, processor, capability)


@pytest.mark.parametrize(
    ("folder", "asked", "capability", "kind"),
    [
        ("plain", "auto", HOPPER, None),
        ("plain", "fp8", HOPPER, EightBitFloats),
        ("plain", "fp8", ADA, EightBitFloats),
        ("plain", "none", HOPPER, None),
        ("FP8", "auto", HOPPER, EightBitFloats),
        ("FP8", "fp8", HOPPER, EightBitFloats),
        ("FP8", "none", HOPPER, None),
        ("AWQ", "auto", HOPPER, FourBitCodes),
        ("AWQ", "auto", AMPERE, FourBitCodes),
        ("AWQ", "int4", HOPPER, FourBitCodes),
        ("AWQ", "none", HOPPER, None),
        ("plain", "auto", NO_GPU, None),
        ("plain", "int4", NO_GPU, FourBit),
        ("FP8", "auto", NO_GPU, None),
        ("FP8", "int4", NO_GPU, FourBit),
        ("AWQ", "auto", NO_GPU, FourBitGroups),
        ("AWQ", "int4", NO_GPU, FourBitGroups),
        ("AWQ", "none", NO_GPU, None),
    ],
)
def test_a_folder_is_served_as_it_says_or_as_is_asked(tmp_path, folder, asked, capability, kind):
    found = chosen_maker(tmp_path, folder, asked, capability)
    assert (found if kind is None else type(found)) is kind


def test_four_bits_become_plain_on_a_processor_without_their_product_and_where_a_precision_is_named(tmp_path):
    assert chosen_maker(tmp_path, "AWQ", "auto", NO_GPU, processor=OLD) is None
    assert chosen_maker(tmp_path, "AWQ", "auto", NO_GPU, dtype="float32") is None


@pytest.mark.parametrize(
    ("folder", "asked", "capability", "sentence"),
    [
        ("plain", "fp8", NO_GPU, r"runs on the CPU, and products in eight-bit floats need a GPU of 8\.9 or more"),
        ("FP8", "fp8", NO_GPU, r"runs on the CPU"),
        ("plain", "fp8", AMPERE, r"runs on a GPU of compute capability 8\.0, and .* Use --quantization auto"),
        ("AWQ", "fp8", HOPPER, r"in four bits already \(AWQ\)\. Use --quantization auto"),
        ("plain", "int4", HOPPER, r"only from an AWQ or GPTQ folder, and this folder's weights are plain.*fp8 or auto"),
        ("FP8", "int4", HOPPER, r"this folder's weights are in FP8"),
    ],
)
def test_what_the_device_or_the_folder_cannot_do_is_refused(tmp_path, folder, asked, capability, sentence):
    with pytest.raises(ConfigError, match=sentence):
        chosen_maker(tmp_path, folder, asked, capability)


def test_a_gpu_without_eight_bit_floats_gives_such_a_folder_the_model_s_precision_and_says_so(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "rota.engine"):
        assert chosen_maker(tmp_path, "FP8", "auto", AMPERE) is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert "in FP8, which this GPU (compute capability 8.0) cannot multiply" in line
    assert "twice the memory" in line


# A light model is one whose layers are computed sooner than they are launched: its steps are all graphs.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, "llama3")
    return folder


@pytest.mark.parametrize(
    ("hidden", "inner", "maker", "is_light"),
    [
        (4096, 14336, None, False),
        (4096, 14336, EightBitFloats(), True),
        (5120, 25600, EightBitFloats(), False),
        (2048, 8192, None, True),
    ],
)
def test_what_a_layer_takes_decides(
    folder: Path, hidden: int, inner: int, maker: EightBitFloats | None, is_light: bool
):
    chosen = choose(EngineConfig(model=ModelConfig(model_path=str(folder), device="cpu"), quiet=True))
    heads = hidden // LLAMA_8B.head_dim
    spec = replace(LLAMA_8B, hidden_size=hidden, intermediate_size=inner, heads=heads)
    assert replace(chosen, spec=spec, dtype=torch.bfloat16, maker=maker).is_light is is_light


# What is asked of a GPU before a byte of weights is read; the GPU is told of, not there.

GIBIBYTE = 1 << 30


def test_weights_are_counted_as_taken_before_they_are_read(monkeypatch):
    monkeypatch.setattr(choices, "device_memory", lambda *_, **__: DeviceMemory(80 * GIBIBYTE, 2 * GIBIBYTE))
    memory = choices._memory_with_weights(weight_bytes(LLAMA_8B, torch.bfloat16), GPU)
    assert memory == DeviceMemory(80 * GIBIBYTE, 2 * GIBIBYTE + weight_bytes(LLAMA_8B, torch.bfloat16))
    assert 15.9e9 < weight_bytes(LLAMA_8B, torch.bfloat16) < 16.2e9


def test_a_model_that_does_not_fit_is_told_so_and_not_that_its_adapters_do_not(monkeypatch):
    monkeypatch.setattr(choices, "device_memory", lambda *_, **__: DeviceMemory(16 * GIBIBYTE, 2 * GIBIBYTE))
    with pytest.raises(ConfigError, match=r"weights take 153\d\d MiB, but only 14336 of the GPU's 16384 MiB are free"):
        choices._memory_with_weights(weight_bytes(LLAMA_8B, torch.bfloat16), GPU)
