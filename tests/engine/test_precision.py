"""What a processor can do goes in, the precision and the form of the weights come out."""

from __future__ import annotations

import logging

import pytest
import torch

from rota.core.config import ModelConfig
from rota.core.errors import ConfigError
from rota.engine.choices import can_compute, choose_dtype, choose_quantization
from rota.engine.cpu import Processor

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
