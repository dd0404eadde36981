"""Qwen2: Llama with biases at queries, keys and values; later layers have windows where the folder uses them."""

from __future__ import annotations

from rota.engine.families.decoder import Family
from rota.engine.families.pre_norm import PreNormModel, pre_norms
from rota.engine.model.config_file import ConfigFile
from rota.engine.model.spec import ModelSpec, common_fields, only_silu, read_windows

ARCHITECTURE = "Qwen2ForCausalLM"
# Layers from here on have a window, where config.json does not say from which.
MAX_WINDOW_LAYERS = 28


def read(config: ConfigFile) -> ModelSpec:
    only_silu(config)
    fields = common_fields(config, ARCHITECTURE)
    if config.flag("use_sliding_window"):
        first = config.get("max_window_layers", MAX_WINDOW_LAYERS)
        fields["windows"] = read_windows(config, fields["layers"], lambda layer: layer >= first)
    return ModelSpec(**fields, layer_norms=pre_norms(fields["hidden_size"]), has_qkv_bias=True)


FAMILY = Family(ARCHITECTURE, read, PreNormModel)
