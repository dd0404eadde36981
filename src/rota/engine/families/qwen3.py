"""Qwen3: Llama with a norm over each query and key head; the context ends at the sliding window, if it is used."""

from __future__ import annotations

from rota.engine.families.family import Family
from rota.engine.families.pre_norm import KEY_NORM, QUERY_NORM, PreNormModel, pre_norms
from rota.engine.model.config_file import ConfigFile
from rota.engine.model.spec import ModelSpec, common_fields, only_silu, within_window

ARCHITECTURE = "Qwen3ForCausalLM"


def read(config: ConfigFile) -> ModelSpec:
    only_silu(config)
    fields = common_fields(config, ARCHITECTURE)
    if config.flag("use_sliding_window"):
        fields["context_length"] = within_window(config, fields["context_length"])
    head_norms = ((QUERY_NORM, fields["head_dim"]), (KEY_NORM, fields["head_dim"]))
    return ModelSpec(
        **fields,
        layer_norms=(*pre_norms(fields["hidden_size"]), *head_norms),
        has_qkv_bias=config.flag("attention_bias"),
        has_output_bias=config.flag("attention_bias"),
    )


FAMILY = Family(ARCHITECTURE, read, PreNormModel)
