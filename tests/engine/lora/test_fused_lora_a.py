"""Adapters' A below the model's matrices: where they lie, and that the model's own product does not notice."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from pathlib import Path

import pytest
import torch

from rota.core.ids import Slot
from rota.engine.families.table import read_spec
from rota.engine.lora.adapters import Adapters
from rota.engine.lora.bank import Bank
from rota.engine.lora.files.checkpoint import read_checkpoint
from rota.engine.lora.layout import fused_rows, fused_sites
from rota.engine.lora.loader import checkpoint_reader
from rota.engine.lora.reference import project_with_lora
from rota.engine.model.linear import Linear
from rota.engine.model.sites import SITES
from rota.engine.model.spec import ModelSpec
from rota.engine.weights.load import ALIGNMENT, LayerWeights, Weights, load_weights, weight_bytes
from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.model_factory import make_tiny_model

CPU = torch.device("cpu")
SLOTS, MAX_RANK = 3, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose qkv has a bias, with an adapter beside it."""
    folder = tmp_path_factory.mktemp("annex")
    make_adapter(folder / "adapter", make_tiny_model(folder / "model", "qwen2"))
    return folder


@pytest.fixture(scope="module")
def spec(folder: Path) -> ModelSpec:
    return read_spec(folder / "model")


@pytest.fixture(scope="module")
def weights(folder: Path, spec: ModelSpec) -> Weights:
    fused = fused_rows(spec, SITES, SLOTS, MAX_RANK)
    return load_weights(folder / "model", spec, CPU, torch.float32, quiet=True, fused=fused)


def projection_of(layer: LayerWeights, site: str) -> Linear:
    found = {"qkv": layer.qkv, "o": layer.output, "gate_up": layer.gate_up, "down": layer.down}[site]
    assert isinstance(found, Linear)
    return found


@pytest.mark.parametrize("site", SITES)
def test_one_product_gives_the_model_s_outputs_and_every_slot_s_share(folder, spec, weights, site):
    adapter = read_checkpoint(folder / "adapter", spec, torch.float32, MAX_RANK)
    bank = Bank(spec, SLOTS, MAX_RANK, torch.float32, CPU, weights.fused_lora_a)
    apart = Bank(spec, SLOTS, MAX_RANK, torch.float32, CPU)
    for one in (bank, apart):
        one.copy_in(Slot(1), adapter)
    plain = load_weights(folder / "model", spec, CPU, torch.float32, quiet=True)
    for number, (layer, other) in enumerate(zip(weights.layers, plain.layers, strict=True)):
        wide, own = projection_of(layer, site), projection_of(other, site)
        assert wide.widened is not None
        x = torch.randn(5, own.weight.shape[1])
        factors = apart.factors(number, site)
        expected = torch.cat([own(x), x @ factors.a.flatten(0, 1).T], dim=1)
        product = wide.widened(x)
        torch.testing.assert_close(product[:, : expected.shape[1]], expected)
        assert product.stride(0) % ALIGNMENT == 0
        assert not product[:, expected.shape[1] :].any()
        torch.testing.assert_close(wide(x), own(x))
        assert factors.a[1].any()
        assert torch.equal(bank.factors(number, site).a, factors.a)


def test_an_engine_that_is_gone_keeps_no_matrix(folder, spec):
    """The thread that reads adapters lives on; a fused LoRA A is part of a block that holds all layers' weights."""
    fused = fused_rows(spec, SITES, SLOTS, MAX_RANK)
    weights = load_weights(folder / "model", spec, CPU, torch.float32, quiet=True, fused=fused)
    bank = Bank(spec, SLOTS, MAX_RANK, torch.float32, CPU, weights.fused_lora_a)
    adapters = Adapters(bank, checkpoint_reader(bank, spec), project_with_lora, rows=4, overlaps=True)
    block = weakref.ref(weights.fused_lora_a["qkv"])
    del weights, bank, adapters
    gc.collect()
    assert block() is None


def test_an_annex_is_no_weight(spec, weights):
    assert weights.size_bytes == weight_bytes(spec, torch.float32)


def test_only_a_bank_that_is_small_beside_a_matrix_lies_below_it(spec):
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128}
    spec = dataclasses.replace(spec, **sizes)
    assert fused_sites(spec, 9, 16, torch.bfloat16) == ("qkv", "o", "gate_up", "down")
    assert fused_sites(spec, 9, 16, torch.float32) == ("o",)  # the same rows, twice the bytes
    assert fused_sites(spec, 33, 64, torch.bfloat16) == ()
    assert fused_rows(spec, ("qkv", "gate_up"), 9, 16) == {"qkv": 432, "gate_up": 288}


def test_a_small_model_has_no_annex_that_its_prompts_would_notice(spec):
    """Few bytes, but many rows beside the model's own."""
    assert fused_sites(spec, SLOTS, MAX_RANK, torch.bfloat16) == ()
