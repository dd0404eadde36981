"""Qwen3: Llama with a norm over each query and key head; the context ends at the sliding window, if it is used."""

from __future__ import annotations

from rota.engine.families.decoder import KEY_NORM, QUERY_NORM, Family
from rota.engine.families.pre_norm import PreNormModel, pre_norms
from rota.engine.model.config_file import ConfigFile
from rota.engine.model.spec import ModelSpec, common_fields, only_silu, read_late_windows

ARCHITECTURE = "Qwen3ForCausalLM"


def read(config: ConfigFile) -> ModelSpec:
    only_silu(config)
    fields = common_fields(config, ARCHITECTURE)
    fields["windows"] = read_late_windows(config, fields["layers"])
    head_norms = ((QUERY_NORM, fields["head_dim"]), (KEY_NORM, fields["head_dim"]))
    return ModelSpec(
        **fields,
        layer_norms=(*pre_norms(fields["hidden_size"]), *head_norms),
        has_qkv_bias=config.flag("attention_bias"),
        has_output_bias=config.flag("attention_bias"),
    )


FAMILY = Family(ARCHITECTURE, read, PreNormModel)
