"""Mistral: Llama without biases; the context ends at the sliding window."""

from __future__ import annotations

from rota.engine.families.family import Family
from rota.engine.families.pre_norm import PreNormModel, pre_norms
from rota.engine.model.config_file import ConfigFile
from rota.engine.model.spec import ModelSpec, common_fields, only_silu, within_window

ARCHITECTURE = "MistralForCausalLM"


def read(config: ConfigFile) -> ModelSpec:
    only_silu(config)
    fields = common_fields(config, ARCHITECTURE)
    fields["context_length"] = within_window(config, fields["context_length"])
    return ModelSpec(**fields, layer_norms=pre_norms(fields["hidden_size"]))


FAMILY = Family(ARCHITECTURE, read, PreNormModel)
