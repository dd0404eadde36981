"""What the formats' own libraries wrote is read as those libraries read it.

formats.safetensors holds a random matrix as AutoAWQ 0.2.9, AutoGPTQ 0.7.1 and compressed-tensors 0.20.0 packed it, and
under `meant` what they unpacked from that. The libraries were used once, and are not needed here.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rota.engine.weights.layouts.layout import StoredTensors, window_of
from rota.engine.weights.layouts.table import read_layout
from rota.engine.weights.shards import Shards
from tests.engine.weights.writers import AWQ, GPTQ, SINGLE, change_config, floats, ints

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
