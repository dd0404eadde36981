"""A tiny random Llama, written as the GGUF file that llama.cpp's converter would make of it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# The last one is never used, because digits stand alone.
MERGES = ["Ġ t", "Ġt h", "Ġth e", "4 2"]
TOKENS = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(m.replace(" ", "") for m in MERGES)]
# In the order of llama.cpp's names within a layer.
PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def tiny_llama(has_tied_embeddings: bool = True) -> LlamaForCausalLM:
    """Weights are float32 that bfloat16 can hold, so that nothing is lost on the way."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_theta=5000.0,
        initializer_range=0.3,
        tie_word_embeddings=has_tied_embeddings,
    )
    model = LlamaForCausalLM(config).eval()
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()
    return model


def write_tiny_gguf(path: Path, model: LlamaForCausalLM, pre_tokenizer: str = "smollm") -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(5000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _add_tokenizer(writer, pre_tokenizer)
    _add_tensors(writer, model)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, pre_tokenizer: str) -> None:
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(TOKENS)
    writer.add_token_types([control if token in SPECIAL_TOKENS else normal for token in TOKENS])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")


def _add_tensors(writer: gguf.GGUFWriter, model: LlamaForCausalLM) -> None:
    weights = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    if "lm_head.weight" in weights:
        writer.add_tensor("output.weight", weights["lm_head.weight"])
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    for layer in range(model.config.num_hidden_layers):
        for ours, theirs in PARTS.items():
            weight = weights[f"model.layers.{layer}.{theirs}.weight"]
            if ours in heads:
                weight = _interleave_halves(weight, heads[ours])
            writer.add_tensor(f"blk.{layer}.{ours}.weight", weight)


def _interleave_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """In every head, the rows of the first half and of the second take turns."""
    shuffled = []
    for head in np.split(weight, heads):
        first, second = np.split(head, 2)
        shuffled += [row for pair in zip(first, second, strict=True) for row in pair]
    return np.stack(shuffled)
