"""Qwen2: Llama with biases at queries, keys and values; the context ends at the sliding window, if it is used."""

from __future__ import annotations

from rota.engine.families.family import Family
from rota.engine.families.pre_norm import PreNormModel, pre_norms
from rota.engine.model.config_file import ConfigFile
from rota.engine.model.spec import ModelSpec, common_fields, only_silu, within_window

ARCHITECTURE = "Qwen2ForCausalLM"


def read(config: ConfigFile) -> ModelSpec:
    only_silu(config)
    fields = common_fields(config, ARCHITECTURE)
    if config.flag("use_sliding_window"):
        fields["context_length"] = within_window(config, fields["context_length"])
    return ModelSpec(**fields, layer_norms=pre_norms(fields["hidden_size"]), has_qkv_bias=True)


FAMILY = Family(ARCHITECTURE, read, PreNormModel)
