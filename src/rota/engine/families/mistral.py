"""Mistral: Llama without biases, with a window in every layer where the folder names one."""

from __future__ import annotations

from rota.engine.families.decoder import Family
from rota.engine.families.pre_norm import PreNormModel, pre_norms
from rota.engine.model.config_file import ConfigFile
from rota.engine.model.spec import ModelSpec, common_fields, only_silu, read_windows

ARCHITECTURE = "MistralForCausalLM"


def read(config: ConfigFile) -> ModelSpec:
    only_silu(config)
    fields = common_fields(config, ARCHITECTURE)
    fields["windows"] = read_windows(config, fields["layers"], lambda _: True)
    return ModelSpec(**fields, layer_norms=pre_norms(fields["hidden_size"]))


FAMILY = Family(ARCHITECTURE, read, PreNormModel)
