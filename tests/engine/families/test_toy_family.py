"""A family is one file and one entry of the table: this one is brought from outside, and no file knows of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import Tensor
from torch.nn import functional

from rota import LLM, SamplingParams
from rota.core.errors import ModelError
from rota.engine.families.decoder import Decoder, Family
from rota.engine.families.table import FAMILIES, read_spec
from rota.engine.layer_cache import LayerCache
from rota.engine.model.config_file import ConfigFile
from rota.engine.model.spec import ModelSpec, common_fields
from rota.engine.step.device_step import DeviceStep, LoraBatch
from tests.engine.model_factory import make_tiny_model
from tests.tiny_tokenizer import write_byte_tokenizer

ARCHITECTURE = "ParrotForCausalLM"


def read(config: ConfigFile) -> ModelSpec:
    """The norms that its folders hold have Llama's names; it uses none of them."""
    fields = common_fields(config, ARCHITECTURE)
    names = ("input_layernorm", "post_attention_layernorm")
    return ModelSpec(**fields, layer_norms=tuple((name, fields["hidden_size"]) for name in names))


class Parrot(Decoder):
    """Says the token it was told again, whatever its layers hold."""

    def forward(self, step: DeviceStep, cache: list[LayerCache]) -> Tensor:
        return self.embed(step)

    def logits(self, hidden: Tensor, out: Tensor | None = None, lora: LoraBatch | None = None) -> Tensor:
        return functional.normalize(hidden) @ functional.normalize(self.weights.embedding).T


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_byte_tokenizer(tmp_path)
    make_tiny_model(tmp_path, "llama2")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [ARCHITECTURE]}))
    return tmp_path


def test_a_folder_of_an_unknown_family_is_refused_with_those_that_are_known(folder):
    with pytest.raises(ModelError, match=rf"{ARCHITECTURE}.*none of which Rota runs; it runs .*GraniteForCausalLM"):
        read_spec(folder)


def test_an_entry_in_the_table_is_all_that_a_new_family_takes(folder, monkeypatch):
    monkeypatch.setitem(FAMILIES, ARCHITECTURE, Family(ARCHITECTURE, read, Parrot))
    llm = LLM(folder, quiet=True, device="cpu", dtype="float32", kv_blocks=32)
    params = SamplingParams(temperature=0.0, max_new_tokens=5, ignore_eos=True)

    first, second = llm.generate([[7, 8, 9], [200]], params)
    assert first.token_ids == (9,) * 5
    assert second.token_ids == (200,) * 5
