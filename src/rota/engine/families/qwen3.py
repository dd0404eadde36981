"""Qwen3: Llama with a norm over each query and key head; the context ends at the sliding window, if it is used."""

from __future__ import annotations

from rota.engine.families.decoder import Family
from rota.engine.families.pre_norm import KEY_NORM, QUERY_NORM, PreNormModel, pre_norms
from rota.engine.model.config_file import ConfigFile
from rota.engine.model.spec import ModelSpec, common_fields, only_silu, read_windows

ARCHITECTURE = "Qwen3ForCausalLM"
# Layers from here on have a window, where config.json does not say from which.
MAX_WINDOW_LAYERS = 28


def read(config: ConfigFile) -> ModelSpec:
    only_silu(config)
    fields = common_fields(config, ARCHITECTURE)
    if config.flag("use_sliding_window"):
        first = config.get("max_window_layers", MAX_WINDOW_LAYERS)
        fields["windows"] = read_windows(config, fields["layers"], lambda layer: layer >= first)
    head_norms = ((QUERY_NORM, fields["head_dim"]), (KEY_NORM, fields["head_dim"]))
    return ModelSpec(
        **fields,
        layer_norms=(*pre_norms(fields["hidden_size"]), *head_norms),
        has_qkv_bias=config.flag("attention_bias"),
        has_output_bias=config.flag("attention_bias"),
    )


FAMILY = Family(ARCHITECTURE, read, PreNormModel)
