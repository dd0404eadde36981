"""Every layout is read as the weights that its writer meant."""

from __future__ import annotations

import pytest
import torch

from rota.engine.families.table import read_spec
from rota.engine.weights.load import load_weights
from tests.engine.weights.writers import LAYOUTS, write_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_read_as_its_writer_meant_it(tmp_path, layout):
    state = write_model(tmp_path, layout, "qwen2").state_dict()
    weights = load_weights(tmp_path, read_spec(tmp_path), CPU, torch.float32, quiet=True)

    prefix = "model.layers.1"
    for site, parts in SITES.items():
        expected = torch.cat([state[f"{prefix}.{part}.weight"] for part in parts])
        torch.testing.assert_close(getattr(weights.layers[1], site).weight, expected, atol=1e-6, rtol=1e-6)
    assert torch.equal(weights.layers[1].qkv.bias[:64], state[f"{prefix}.self_attn.q_proj.bias"])


SITES = {
    "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "output": ["self_attn.o_proj"],
    "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "down": ["mlp.down_proj"],
}
