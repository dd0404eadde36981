"""What is asked, what the folder stores and what the device multiplies go in; the maker, or a sentence, comes out."""

from __future__ import annotations

import logging

import pytest
import torch

from rota.core.config import ModelConfig
from rota.core.errors import ConfigError
from rota.engine.choices import choose_maker
from rota.engine.cpu import Processor
from rota.engine.quantised.maker import MatrixMaker
from rota.engine.quantised.matrices import FourBit, GroupsFile
from rota.engine.weights.layouts.awq_gptq import AwqLayout
from rota.engine.weights.layouts.fp8 import Float8Layout
from rota.engine.weights.makers import EightBitFloats, FourBitCodes, FourBitGroups

ARM, OLD = Processor(frozenset(), "dynamic"), Processor(frozenset(), None)
CPU, AMPERE, ADA, HOPPER = None, (8, 0), (8, 9), (9, 0)
FOLDERS = {
    "plain": None,
    "FP8": Float8Layout(method="FP8", holds=lambda _: True),
    "AWQ": AwqLayout(holds=lambda _: True, group_size=128),
}


def chosen(tmp_path, folder, asked, capability, processor=ARM, dtype="auto") -> MatrixMaker | None:
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
        ("plain", "auto", CPU, None),
        ("plain", "int4", CPU, FourBit),
        ("FP8", "auto", CPU, None),
        ("FP8", "int4", CPU, FourBit),
        ("AWQ", "auto", CPU, FourBitGroups),
        ("AWQ", "int4", CPU, FourBitGroups),
        ("AWQ", "none", CPU, None),
    ],
)
def test_a_folder_is_served_as_it_says_or_as_is_asked(tmp_path, folder, asked, capability, kind):
    found = chosen(tmp_path, folder, asked, capability)
    assert (found if kind is None else type(found)) is kind


def test_four_bits_become_plain_on_a_processor_without_their_product_and_where_a_precision_is_named(tmp_path):
    assert chosen(tmp_path, "AWQ", "auto", CPU, processor=OLD) is None
    assert chosen(tmp_path, "AWQ", "auto", CPU, dtype="float32") is None


@pytest.mark.parametrize(
    ("folder", "asked", "capability", "sentence"),
    [
        ("plain", "fp8", CPU, r"runs on the CPU, and products in eight-bit floats need a GPU of 8\.9 or more"),
        ("FP8", "fp8", CPU, r"runs on the CPU"),
        ("plain", "fp8", AMPERE, r"runs on a GPU of compute capability 8\.0, and .* Use --quantization auto"),
        ("AWQ", "fp8", HOPPER, r"in four bits already \(AWQ\)\. Use --quantization auto"),
        ("plain", "int4", HOPPER, r"only from an AWQ or GPTQ folder, and this folder's weights are plain.*fp8 or auto"),
        ("FP8", "int4", HOPPER, r"this folder's weights are in FP8"),
    ],
)
def test_what_the_device_or_the_folder_cannot_do_is_refused(tmp_path, folder, asked, capability, sentence):
    with pytest.raises(ConfigError, match=sentence):
        chosen(tmp_path, folder, asked, capability)


def test_a_gpu_without_eight_bit_floats_gives_such_a_folder_the_model_s_precision_and_says_so(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "rota.engine"):
        assert chosen(tmp_path, "FP8", "auto", AMPERE) is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert "in FP8, which this GPU (compute capability 8.0) cannot multiply" in line
    assert "twice the memory" in line
