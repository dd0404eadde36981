"""A product stays open where its site is listed, beside prompts that of silu alone; and only in steps with adapters."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rota.engine.attention.torch_attention import TorchAttention
from rota.engine.families.decoder import Kernels
from rota.engine.families.table import make_model, read_spec
from rota.engine.layer_cache import LayerCache
from rota.engine.lora.batch import make_batch
from rota.engine.lora.deferred import DeferredLora, Output
from rota.engine.lora.layout import SiteFactors
from rota.engine.model.linear import Projection
from rota.engine.model.sites import SITES, site_shapes
from rota.engine.ops.cpu import CPUOperations
from rota.engine.parallel.group import RankGroup
from rota.engine.step.device_step import DeviceStep, LoraBatch, PrefillPart, int32
from rota.engine.weights.load import dummy_weights

CPU = torch.device("cpu")
CONFIG = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 16, "max_position_embeddings": 16, "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}  # fmt: skip
ALL = dict.fromkeys(SITES, 2)


class Spy(CPUOperations):
    """Notes which operations got an open product."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []

    def _note(self, output: Output, name: str) -> Output:
        if isinstance(output, DeferredLora):
            self.opened.append(name)
        return output

    def add_rms_norm(self, x: Output, *others: Tensor) -> tuple[Tensor, Tensor]:
        return super().add_rms_norm(self._note(x, "norm"), *others)

    def silu_multiply(self, gate_up: Output) -> Tensor:
        return super().silu_multiply(self._note(gate_up, "silu"))

    def rotate_and_store(self, qkv: Output, *others) -> Tensor:
        return super().rotate_and_store(self._note(qkv, "rotate"), *others)


def opened(tmp_path: Path, step: DeviceStep, architecture: str = "LlamaForCausalLM", group=None) -> list[str]:
    """Which operations of one layer get an open product; every product's adapters must be added once."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"architectures": [architecture]}))
    spec, spy, added = read_spec(tmp_path), Spy(), []
    shapes = {shape.name: shape for shape in site_shapes(spec)}

    def project(projection: Projection, x: Tensor, _: int, site: str, batch: LoraBatch) -> Output:
        factors = SiteFactors(shapes[site], x, x, x)
        return DeferredLora(y=projection(x), shrunk=x, factors=factors, batch=batch, add=lambda *_: added.append(site))

    kernels = Kernels(spy, TorchAttention(spec.attention_scale), project, group or RankGroup(), open_sites=ALL)
    size = (2, spec.kv_heads, 8, spec.head_dim)
    cache = [LayerCache(torch.zeros(size), torch.zeros(size))]
    make_model(spec, dummy_weights(spec, CPU, torch.float32), kernels).forward(step, cache)
    assert sorted(added) == ([] if step.lora is None else sorted(SITES))
    return spy.opened


def decodes(count: int) -> DeviceStep:
    """The first tokens of as many rows, which share a block: nothing here looks at numbers."""
    numbers = torch.arange(count)
    lora = make_batch(np.zeros(count, np.int32), 1, CPU)
    tables = torch.zeros(count + 1, 2, dtype=torch.int32)
    rows, lengths = int32(list(range(count))), int32([1] * count)
    return DeviceStep(numbers, numbers * 0, numbers, tables, rows, lengths, lora=lora)


def test_the_operation_behind_each_product_gets_it_open(tmp_path):
    assert opened(tmp_path, decodes(2)) == ["rotate", "norm", "silu", "norm"]


def test_more_decodes_than_are_listed_close_it_first(tmp_path):
    assert opened(tmp_path, decodes(3)) == []


def test_beside_a_prompt_the_gates_alone_stay_open_however_many_tokens_there_are(tmp_path):
    part = PrefillPart(int32([0]), int32([0]), int32([0, 3]), 3, (0,), (0,), (3,))
    step = replace(decodes(3), decode_rows=int32([]), decode_lengths=int32([]), prefill=part)
    assert opened(tmp_path, step) == ["silu"]


def test_a_step_without_adapters_has_nothing_open(tmp_path):
    assert opened(tmp_path, replace(decodes(2), lora=None)) == []


def test_what_ranks_sum_is_closed_before_the_sum(tmp_path):
    assert opened(tmp_path, decodes(2), group=RankGroup(size=2)) == ["rotate", "silu"]


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [("GraniteForCausalLM", ["rotate", "silu"]), ("Olmo2ForCausalLM", ["silu"])],
)
def test_a_family_that_does_something_before_closes_it_there(tmp_path, architecture, expected):
    assert opened(tmp_path, decodes(2), architecture) == expected
