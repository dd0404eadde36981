"""Every field of an adapter_config.json is read, or makes no difference once trained, or refuses the adapter.

A field that is null, false or empty is not set. What PEFT adds in a later release is refused by its name as soon as an
adapter sets it, because it may change what is computed.
"""

from __future__ import annotations

from collections.abc import Iterator

from rota.engine.model.config_file import ConfigFile

READ = frozenset((
    "peft_type", "base_model_name_or_path", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "use_dora", "lora_bias", "bias",
    "ensure_weight_tying", "trainable_token_indices", "modules_to_save", "init_lora_weights",
))  # fmt: skip
# How an adapter was trained, and for what. PEFT sets fan_in_fan_out aside for the matrices of these models.
NO_MATTER = frozenset((
    "task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "lora_dropout", "fan_in_fan_out",
    "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config", "runtime_config",
    "qalora_group_size",
))  # fmt: skip
# What an adapter has that sets one of these.
REFUSED = {
    "target_parameters": "factors on bare parameters",
    "layer_replication": "repeated layers",
    "megatron_config": "factors of Megatron's parallel layers",
    "alora_invocation_tokens": "activated LoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
}
PLAIN_STARTS = ("gaussian", "orthogonal", "eva", "mica")
# Initialisations that change the base weights, so that the factors alone are not the fine-tune.
CONVERTIBLE_STARTS = ("pissa", "corda", "olora", "lora_ga")
QUANTISED_START = "loftq"


def refused_fields(config: ConfigFile) -> Iterator[str]:
    """A sentence for each field that makes an adapter another than factors on top of the model."""
    for name, value in config.values.items():
        if not value or name in READ or name in NO_MATTER:
            continue
        if name in REFUSED:
            yield f"{config.path} sets '{name}': the adapter has {REFUSED[name]}, which Rota does not serve."
        else:
            yield (
                f"{config.path} sets '{name}' to {_shown(value)}, a field that Rota does not know. It may change what "
                "the adapter computes; if it does not, remove it from the file."
            )
    yield from _refused_start(config)


def _refused_start(config: ConfigFile) -> Iterator[str]:
    start = config.get("init_lora_weights", True)
    if isinstance(start, bool) or start in PLAIN_STARTS:
        return
    kind, sets = str(start).lower(), f"{config.path} sets 'init_lora_weights' to {_shown(start)}"
    if kind.startswith(CONVERTIBLE_STARTS):
        yield (
            f"{sets}, which also changed the base weights; convert the adapter with PEFT's "
            "save_pretrained(path_initial_model_for_weight_conversion=…)."
        )
    elif kind == QUANTISED_START:
        yield (
            f"{sets}, which also changed the base weights, and PEFT cannot convert that. Save the base model it was "
            "trained on, set the field to true, and serve both together."
        )
    else:
        yield f"{sets}, which Rota does not know; it may have changed the base weights."


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
