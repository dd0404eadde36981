"""Tiny random models of every family, saved as transformers saves real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

# Those with a window have one of 24 tokens, which the tests' prompts and answers leave far behind.
WINDOW = 24
WINDOWED = ("mistral, windowed", "qwen2, windowed", "gemma3")
FAMILIES = ("llama2", "llama3", "mistral", "qwen2", "qwen3", "smollm2", "olmo2", "granite", *WINDOWED)

_SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # The usual 0.02 makes so small a model nearly linear, and most mistakes invisible.
    "initializer_range": 0.15,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama2": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 4}),
    "llama3": (LlamaConfig, LlamaForCausalLM, {"num_hidden_layers": 3, "rope_parameters": _LLAMA3_ROPE}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None, "head_dim": 16}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
    "smollm2": (
        LlamaConfig,
        LlamaForCausalLM,
        {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, {}),
    "granite": (
        GraniteConfig,
        GraniteForCausalLM,
        {
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
            "tie_word_embeddings": False,
        },
    ),
    "mistral, windowed": (MistralConfig, MistralForCausalLM, {"sliding_window": WINDOW, "head_dim": 16}),
    "qwen2, windowed": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10_000.0},
            },
            "final_logit_softcapping": 5.0,
        },
    ),
}


def make_tiny_model(folder: Path, family: str, **overrides: Any) -> PreTrainedModel:
    """Save a random float32 model into `folder` (llama3 and qwen3 in shards) and return it, ready to be asked.

    `overrides` are fields of the family's transformers config.
    """
    config_class, model_class, fields = _KINDS[family]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config_class(**{**_SMALL, **fields, **overrides})).eval()
        for name, parameter in model.named_parameters():
            # transformers starts biases at nought and norms at one, where mixing them up would not show.
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.2)
            elif "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    shard_size = "100KB" if family in ("llama3", "qwen3") else "1GB"
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model
