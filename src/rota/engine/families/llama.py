"""Llama, and every model whose config.json names its architecture."""

from __future__ import annotations

from rota.engine.families.decoder import Family
from rota.engine.families.pre_norm import PreNormModel, pre_norms
from rota.engine.model.config_file import ConfigFile
from rota.engine.model.spec import ModelSpec, common_fields, only_silu

ARCHITECTURE = "LlamaForCausalLM"


def read(config: ConfigFile) -> ModelSpec:
    only_silu(config)
    fields = common_fields(config, ARCHITECTURE)
    return ModelSpec(
        **fields,
        layer_norms=pre_norms(fields["hidden_size"]),
        has_qkv_bias=config.flag("attention_bias"),
        has_output_bias=config.flag("attention_bias"),
        has_mlp_bias=config.flag("mlp_bias"),
    )


FAMILY = Family(ARCHITECTURE, read, PreNormModel)
