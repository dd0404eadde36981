"""Llama, and the families that compute as it does and differ in their config.json alone: Mistral, Qwen2 and Qwen3."""

from __future__ import annotations

from rota.engine.families.decoder import KEY_NORM, QUERY_NORM, Family
from rota.engine.families.pre_norm import PreNormModel, pre_norm_fields
from rota.engine.model.config_file import ConfigFile
from rota.engine.model.spec import ModelSpec, read_late_windows, read_windows

LLAMA, MISTRAL, QWEN2, QWEN3 = "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"


def read_llama(config: ConfigFile) -> ModelSpec:
    """Also of every other model whose config.json names this architecture."""
    return ModelSpec(
        **pre_norm_fields(config, LLAMA),
        has_qkv_bias=config.flag("attention_bias"),
        has_output_bias=config.flag("attention_bias"),
        has_mlp_bias=config.flag("mlp_bias"),
    )


def read_mistral(config: ConfigFile) -> ModelSpec:
    """No biases; a window in every layer where the folder names one."""
    fields = pre_norm_fields(config, MISTRAL)
    return ModelSpec(**fields, windows=read_windows(config, fields["layers"], lambda _: True))


def read_qwen2(config: ConfigFile) -> ModelSpec:
    """Biases at queries, keys and values; later layers have windows where the folder uses them."""
    fields = pre_norm_fields(config, QWEN2)
    return ModelSpec(**fields, windows=read_late_windows(config, fields["layers"]), has_qkv_bias=True)


def read_qwen3(config: ConfigFile) -> ModelSpec:
    """A norm over each query and key head; later layers have windows where the folder uses them."""
    fields = pre_norm_fields(config, QWEN3)
    fields["layer_norms"] += ((QUERY_NORM, fields["head_dim"]), (KEY_NORM, fields["head_dim"]))
    return ModelSpec(
        **fields,
        windows=read_late_windows(config, fields["layers"]),
        has_qkv_bias=config.flag("attention_bias"),
        has_output_bias=config.flag("attention_bias"),
    )


FAMILIES = (
    Family(LLAMA, read_llama, PreNormModel),
    Family(MISTRAL, read_mistral, PreNormModel),
    Family(QWEN2, read_qwen2, PreNormModel),
    Family(QWEN3, read_qwen3, PreNormModel),
)
