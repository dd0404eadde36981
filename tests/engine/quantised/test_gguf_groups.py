"""Blocks of a GGUF file come out as the weights that the format's own reader makes of them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import save_file

from rota.engine.folders.gguf_folder import group_parts
from rota.engine.quantised.matrices import GroupsFile
from rota.engine.quantised.names import GROUPS_FILE


@pytest.mark.parametrize(("kind", "is_doubled"), [(Kind.Q4_1, False), (Kind.Q8_0, True)])
def test_groups_are_the_weights_of_the_format_s_own_reader(tmp_path, kind, is_doubled):
    weights = np.random.default_rng(0).standard_normal((48, 96), dtype=np.float32)
    data = gguf.quants.quantize(weights, kind)
    save_file(group_parts("w", data, kind, (48, 96)), tmp_path / GROUPS_FILE)

    groups = GroupsFile(tmp_path).find("w")
    assert groups is not None
    found = groups.weights()
    if is_doubled:
        found = sum(found.chunk(2, dim=1))
    expected = torch.from_numpy(gguf.dequantize(data, kind))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_what_is_in_no_groups_of_ours_has_no_parts():
    weights = np.zeros((4, 32), np.float32)
    assert group_parts("w", weights.view(np.uint8), Kind.F32, (4, 32)) == {}
