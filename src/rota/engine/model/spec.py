"""A ModelSpec says what a Hugging Face folder's config.json describes, in our words and checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from rota.core.errors import ModelError
from rota.engine.model.config_file import ConfigFile
from rota.engine.model.rotary import RotarySpec, yarn_attention_factor

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROTARY_KINDS = ("default", "dynamic", "linear", "llama3", "yarn")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes and constants of one model of the Llama family."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_epsilon: float
    context_length: int
    rotary: RotarySpec
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_head_norms: bool
    has_tied_embeddings: bool
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]


def read_spec(folder: Path) -> ModelSpec:
    """Read config.json (and generation_config.json's end-of-sequence tokens) of a model folder."""
    if not folder.is_dir():
        raise ModelError(f"There is no model folder at {folder}; give a folder in Hugging Face format.")
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} is not a model folder: it has no config.json. Give a folder in Hugging Face format, with "
            "config.json, tokenizer.json and *.safetensors."
        )
    config = ConfigFile(folder / "config.json")
    architecture = _architecture(config)
    if config.get("quantization_config"):
        raise ModelError(
            f"{config.path} describes quantised weights, which Rota does not read; use the model's bfloat16, float16 "
            "or float32 version."
        )
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{config.path} asks for the activation '{config.get('hidden_act')}'; Rota has only 'silu'.")
    hidden_size, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    kv_heads = config.whole("num_key_value_heads", heads)
    head_dim = config.whole("head_dim", hidden_size // heads)
    if heads % kv_heads or head_dim % 2:
        raise ModelError(
            f"{config.path} has {heads} heads, {kv_heads} key-value heads and a head_dim of {head_dim}; heads must be "
            "a multiple of key-value heads and head_dim must be even."
        )
    rotary = _rotary(config)
    attention_bias = architecture != "MistralForCausalLM" and config.flag("attention_bias")
    return ModelSpec(
        architecture=architecture,
        vocab_size=config.whole("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.whole("intermediate_size"),
        layers=config.whole("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_epsilon=config.number("rms_norm_eps", 1e-6),
        context_length=_context_length(config, architecture, rotary),
        rotary=rotary,
        has_qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
        has_output_bias=architecture != "Qwen2ForCausalLM" and attention_bias,
        has_mlp_bias=architecture == "LlamaForCausalLM" and config.flag("mlp_bias"),
        has_head_norms=architecture == "Qwen3ForCausalLM",
        has_tied_embeddings=config.flag("tie_word_embeddings"),
        dtype=_dtype(config),
        eos_token_ids=_eos_token_ids(config, folder / "generation_config.json"),
    )


def _architecture(config: ConfigFile) -> str:
    names = config.get("architectures", [])
    for architecture in ARCHITECTURES:
        if isinstance(names, list) and architecture in names:
            return architecture
    raise ModelError(
        f"{config.path} names the architectures {names!r} (model_type {config.get('model_type')!r}), none of which "
        f"Rota runs; it runs {', '.join(ARCHITECTURES)}."
    )


def _rotary(config: ConfigFile) -> RotarySpec:
    """Both spellings: `rope_theta` beside `rope_scaling`, and transformers 5's `rope_parameters` with all in one."""
    values = config.section("rope_parameters") or config.section("rope_scaling")
    scaling = ConfigFile(config.path, values)
    if any(isinstance(value, dict) for value in values.values()):
        raise ModelError(f"{config.path} has rotary parameters per kind of layer; Rota wants one set for all layers.")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROTARY_KINDS:
        raise ModelError(
            f"{config.path} asks for rope scaling '{kind}', which Rota does not do; it does {', '.join(ROTARY_KINDS)}."
        )
    if scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError(f"{config.path} rotates only part of each head (partial_rotary_factor); Rota rotates all.")
    theta = scaling.number("rope_theta", config.number("rope_theta", 10_000.0))
    # Dynamic scaling sets in beyond max_position_embeddings, where we do not go: `_context_length` ends there.
    if kind in ("default", "dynamic"):
        return RotarySpec(theta)
    longest = config.whole("max_position_embeddings")
    original = config.whole(
        "original_max_position_embeddings", scaling.whole("original_max_position_embeddings", longest)
    )
    if kind == "linear":
        return RotarySpec(theta, "linear", scaling.number("factor"))
    if kind == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        if low >= high:
            raise ModelError(f"{config.path}: high_freq_factor ({high:g}) must be above low_freq_factor ({low:g}).")
        return RotarySpec(theta, "llama3", scaling.number("factor"), original, fewest_turns=low, most_turns=high)
    factor = scaling.number("factor", longest / original)
    attention_factor = yarn_attention_factor(factor)
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        attention_factor = yarn_attention_factor(factor, scaling.number("mscale"))
        attention_factor /= yarn_attention_factor(factor, scaling.number("mscale_all_dim"))
    return RotarySpec(
        theta,
        "yarn",
        factor,
        original,
        fewest_turns=scaling.number("beta_slow", 1.0),
        most_turns=scaling.number("beta_fast", 32.0),
        is_truncated=scaling.flag("truncate", True),
        attention_factor=scaling.number("attention_factor", attention_factor),
    )


def _context_length(config: ConfigFile, architecture: str, rotary: RotarySpec) -> int:
    length = config.whole("max_position_embeddings")
    # Folders write the stretched length, or the original one and leave the multiplication to the reader. Only yarn
    # tells which; linear scaling does not, and the shorter of both is right for every folder.
    if rotary.kind == "yarn":
        length = max(length, int(rotary.original_context * rotary.factor))
    # Up to its length a sliding window hides nothing, so a context cut to the window gives the model's own answers;
    # a longer prompt is refused like any that exceeds the context.
    slides = architecture == "MistralForCausalLM" or config.flag("use_sliding_window")
    return min(length, config.whole("sliding_window", length)) if slides else length


def _dtype(config: ConfigFile) -> torch.dtype:
    name = config.get("dtype", config.get("torch_dtype", "float32"))
    if not isinstance(name, str) or name not in DTYPES:
        raise ModelError(f"{config.path} names the dtype {name!r}; Rota runs {', '.join(DTYPES)}.")
    return DTYPES[name]


def _eos_token_ids(config: ConfigFile, generation_path: Path) -> tuple[int, ...]:
    """Those of both files: chat models often list the end of a turn only in generation_config.json."""
    configs = [config, ConfigFile(generation_path)] if generation_path.is_file() else [config]
    found: dict[int, None] = {}
    for each in configs:
        value = each.get("eos_token_id", [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            raise ModelError(f"{each.path}: 'eos_token_id' must be a token number or a list of them, not {value!r}.")
        found.update(dict.fromkeys(ids))
    return tuple(found)
