"""A ModelSpec holds what a Hugging Face folder's config.json describes, checked and in Rota's words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rota.core.errors import ModelError
from rota.engine.model.config_file import ConfigFile
from rota.engine.model.rotary import RotarySpec, read_rotary

# ── windows ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# Windows say, layer by layer, how many of the last tokens a query sees.

FULL, SLIDING = "full_attention", "sliding_attention"

# For each layer: the tokens that a query sees, its own included; None: all of them.
Windows = tuple[int | None, ...]
# Layers of Qwen from here on have a window, where config.json does not say from which.
MAX_WINDOW_LAYERS = 28


def read_windows(config: ConfigFile, layers: int, is_sliding: Callable[[int], bool]) -> Windows:
    """One window for each layer. `is_sliding` decides where config.json has no `layer_types`."""
    kinds = config.get("layer_types") or [SLIDING if is_sliding(layer) else FULL for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {FULL, SLIDING}:
        raise ModelError(
            f"{config.path}: 'layer_types' must name '{FULL}' or '{SLIDING}' for each of {layers} layers, "
            f"not {kinds!r}."
        )
    if SLIDING not in kinds or config.get("sliding_window") is None:
        return (None,) * layers
    window = config.whole("sliding_window")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def read_late_windows(config: ConfigFile, layers: int) -> Windows:
    """Of Qwen's folders: later layers have windows, if the folder uses them."""
    if not config.flag("use_sliding_window"):
        return ()
    first = config.get("max_window_layers", MAX_WINDOW_LAYERS)
    return read_windows(config, layers, lambda layer: layer >= first)


DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Shapes and constants of one model; a family adds its own."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    kv_copies: int = 1  # ranks that hold each KV head
    head_dim: int
    norm_epsilon: float
    context_length: int
    rotary: RotarySpec
    attention_scale: float  # the factor of the scores before the softmax
    layer_norms: tuple[tuple[str, int], ...]  # (name, width) of each layer's norms
    norms_all_heads: bool = False  # queries and keys have one norm over all heads, not one over each head
    windows: Windows = ()  # empty: every layer sees all tokens
    window_rotary: RotarySpec | None = None  # of layers with a window, where they have their own
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_tied_embeddings: bool = False
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]

    @property
    def deep_prefix(self) -> int:
        """Behind this many tokens the attention of a prompt's token takes as long as all else of it."""
        # A weight is multiplied once, a token of the prefix twice: in the scores and in the sum. Attention gets about
        # half of a matrix product's speed (on an H200 384 of 781 TFLOP/s).
        return max(1, round(self.layer_numbers / (2 * self.heads * self.head_dim) / 2))

    @property
    def layer_numbers(self) -> int:
        """How many weights the matrices of a layer have."""
        heads = (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        return self.hidden_size * (heads + 3 * self.intermediate_size)

    @property
    def widest_window(self) -> int | None:
        """How many of the last tokens any layer sees; None if one sees all."""
        windows = [window for window in self.windows if window is not None]
        return max(windows) if windows and len(windows) == len(self.windows) else None


def common_fields(config: ConfigFile, architecture: str, rotary: RotarySpec | None = None) -> dict[str, Any]:
    """The fields that all families read alike; a family adds its own, or replaces one."""
    hidden_size, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    kv_heads = config.whole("num_key_value_heads", heads)
    head_dim = config.whole("head_dim", hidden_size // heads)
    if heads % kv_heads or head_dim % 2:
        raise ModelError(
            f"{config.path} has {heads} heads, {kv_heads} key-value heads and a head_dim of {head_dim}; heads must be "
            "a multiple of key-value heads and head_dim must be even."
        )
    rotary = rotary or read_rotary(config)
    return {
        "architecture": architecture,
        "vocab_size": config.whole("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": config.whole("intermediate_size"),
        "layers": config.whole("num_hidden_layers"),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "norm_epsilon": config.number("rms_norm_eps", 1e-6),
        "context_length": _context_length(config, rotary),
        "rotary": rotary,
        "attention_scale": head_dim**-0.5,
        "has_tied_embeddings": config.flag("tie_word_embeddings"),
        "dtype": _dtype(config),
        "eos_token_ids": _eos_token_ids(config),
    }


def only_silu(config: ConfigFile) -> None:
    """Refuse an activation other than silu."""
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{config.path} asks for the activation '{config.get('hidden_act')}'; Rota has only 'silu'.")


def _context_length(config: ConfigFile, rotary: RotarySpec) -> int:
    length = config.whole("max_position_embeddings")
    # Some folders write the scaled length, others the original one, which the reader must multiply. Only yarn says
    # which; linear scaling does not, and the shorter of both is right for every folder.
    if rotary.kind == "yarn":
        length = max(length, int(rotary.original_context * rotary.factor))
    return length


def _dtype(config: ConfigFile) -> torch.dtype:
    name = config.get("dtype", config.get("torch_dtype", "float32"))
    if not isinstance(name, str) or name not in DTYPES:
        raise ModelError(f"{config.path} names the dtype {name!r}; Rota runs {', '.join(DTYPES)}.")
    return DTYPES[name]


def _eos_token_ids(config: ConfigFile) -> tuple[int, ...]:
    """From both files: chat models often list the end of a turn only in generation_config.json."""
    generation_path = config.path.with_name("generation_config.json")
    configs = [config, ConfigFile(generation_path)] if generation_path.is_file() else [config]
    found: dict[int, None] = {}
    for each in configs:
        value = each.get("eos_token_id", [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            raise ModelError(f"{each.path}: 'eos_token_id' must be a token number or a list of them, not {value!r}.")
        found.update(dict.fromkeys(ids))
    return tuple(found)
