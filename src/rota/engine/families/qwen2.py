"""Qwen2: Llama with biases at queries, keys and values; later layers have windows where the folder uses them."""

from __future__ import annotations

from rota.engine.families.decoder import Family
from rota.engine.families.pre_norm import PreNormModel, pre_norms
from rota.engine.model.config_file import ConfigFile
from rota.engine.model.spec import ModelSpec, common_fields, only_silu, read_late_windows

ARCHITECTURE = "Qwen2ForCausalLM"


def read(config: ConfigFile) -> ModelSpec:
    only_silu(config)
    fields = common_fields(config, ARCHITECTURE)
    fields["windows"] = read_late_windows(config, fields["layers"])
    return ModelSpec(**fields, layer_norms=pre_norms(fields["hidden_size"]), has_qkv_bias=True)


FAMILY = Family(ARCHITECTURE, read, PreNormModel)
