"""A GGUF file of a small Llama becomes a folder in Hugging Face format, with its groups of 4 and 8 bits kept."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rota.core.errors import ModelError
from rota.engine.progress import tracked
from rota.engine.quantised.names import CODES, GROUPS_FILE, MINIMA, SCALES

# ── safetensors writer ──────────────────────────────────────────────────────────────────────────────────────────────
# A safetensors file is written tensor by tensor: the library's own writer needs all tensors in memory at once.


class GgufTensor(NamedTuple):
    """A tensor in the header."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "BF16"  # in safetensors' words
    itemsize: int = 2


def write_safetensors(path: Path, entries: Sequence[GgufTensor], arrays: Iterable[npt.NDArray[Any]]) -> None:
    """Write the arrays in the order of their entries."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.itemsize * math.prod(entry.shape)
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays:
            file.write(array.tobytes())


# ── gguf groups ─────────────────────────────────────────────────────────────────────────────────────────────────────
# A GGUF file's blocks of 32 weights become codes, scales and minima, each in one array.
#
# Q4_1    [ scale f16 | minimum f16 | 16 bytes: code i below, code i + 16 above ]      code * scale + minimum
# Q8_0    [ scale f16 | 32 codes int8 ]                                                code * scale

Bytes = npt.NDArray[np.uint8]


def group_parts(
    name: str, data: Bytes, kind: gguf.GGMLQuantizationType, shape: tuple[int, ...]
) -> dict[str, npt.NDArray[Any]]:
    """The parts of a tensor in groups of four or eight bits, by name; empty for any other tensor."""
    if kind == gguf.GGMLQuantizationType.Q4_1:
        blocks = data.reshape(shape[0], -1, 20)
        halves = blocks[:, :, 4:]
        codes = np.concatenate((halves & 15, halves >> 4), axis=2).reshape(shape)
        return {
            name + CODES: codes[:, 0::2] | (codes[:, 1::2] << 4),
            name + SCALES: _numbers(blocks, 0),
            name + MINIMA: _numbers(blocks, 2),
        }
    if kind == gguf.GGMLQuantizationType.Q8_0:
        blocks = data.reshape(shape[0], -1, 34)
        codes = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8).reshape(shape)
        return {name + CODES: codes, name + SCALES: _numbers(blocks, 0)}
    return {}


def _numbers(blocks: Bytes, at: int) -> npt.NDArray[np.float16]:
    """[rows, blocks] the numbers that begin at byte `at` of each block."""
    return np.ascontiguousarray(blocks[:, :, at : at + 2]).view("<f2")[:, :, 0]


OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
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


class _Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    source: gguf.ReaderTensor
    # The number of heads whose rows llama.cpp has shuffled; 0 where it has not.
    shuffled_heads: int


def convert_gguf(source: Path, folder: Path, quiet: bool) -> None:
    """Write the model in `source` into `folder`, weights in bfloat16."""
    try:
        reader = gguf.GGUFReader(source)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, KeyError, IndexError) as error:
        raise ModelError(f"{source} is not a whole GGUF file ({error}); fetch it again.") from error
    _check(source, fields)
    tensors = [_placed(tensor, fields) for tensor in reader.tensors]
    config = _config(fields, has_tied_embeddings=all(tensor.name != "lm_head.weight" for tensor in tensors))
    _write_json(folder / "config.json", config)
    special_ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", special_ids)
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(fields))
    _tokenizer(fields).save(str(folder / "tokenizer.json"))
    unpacked = tracked(tensors, f"Unpacking {source.stem}", "tensors", quiet)
    entries = [GgufTensor(tensor.name, tensor.shape) for tensor in tensors]
    write_safetensors(folder / "model.safetensors", entries, (_bfloat16(_weights(tensor)) for tensor in unpacked))
    if groups := {name: part for tensor in tensors for name, part in _groups(tensor)}:
        save_file(groups, folder / GROUPS_FILE, {"format": "pt"})


def _check(source: Path, fields: dict[str, Any]) -> None:
    expected = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
    }
    for name, value in expected.items():
        if fields.get(name) != value:
            raise ModelError(f"{source} has {name} {fields.get(name)!r}; only {value!r} can be converted.")


def _placed(tensor: gguf.ReaderTensor, fields: dict[str, Any]) -> _Tensor:
    heads = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    # GGUF lists the innermost dimension first.
    shape = tuple(int(size) for size in reversed(tensor.shape))
    if tensor.name in OUTER_NAMES:
        return _Tensor(OUTER_NAMES[tensor.name], shape, tensor, 0)
    _, layer, part, kind = tensor.name.split(".")
    shuffled_heads = fields[heads[part]] if part in heads else 0
    return _Tensor(f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}", shape, tensor, shuffled_heads)


def _weights(tensor: _Tensor) -> npt.NDArray[np.float32]:
    weights: npt.NDArray[np.float32] = gguf.dequantize(tensor.source.data, tensor.source.tensor_type)
    return _in_order(weights, tensor.shuffled_heads)


def _groups(tensor: _Tensor) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """The tensor's codes, scales and minima as in the file; none if the tensor is not in groups."""
    parts = group_parts(tensor.name, tensor.source.data, tensor.source.tensor_type, tensor.shape)
    for name, part in parts.items():
        yield name, np.ascontiguousarray(_in_order(part, tensor.shuffled_heads))


def _in_order(rows: npt.NDArray[Any], shuffled_heads: int) -> npt.NDArray[Any]:
    """llama.cpp rotates neighbours, Hugging Face rotates halves: in every head the rows
    0, h, 1, h + 1, …, h - 1, 2h - 1    become    0, 1, …, 2h - 1.
    """
    if not shuffled_heads:
        return rows
    pairs = rows.reshape(shuffled_heads, len(rows) // shuffled_heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _bfloat16(weights: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper halves of the floats, rounded to nearest, ties to even; NumPy has no bfloat16."""
    bits = np.ascontiguousarray(weights, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def _config(fields: dict[str, Any], has_tied_embeddings: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields["llama.rope.freq_base"],
        "rms_norm_eps": _as_written(fields["llama.attention.layer_norm_rms_epsilon"]),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": has_tied_embeddings,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _as_written(value: float) -> float:
    """The shortest decimal of a float32: 1e-05 instead of 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    # What llama.cpp calls "smollm": every digit alone, then words as GPT-2 splits them.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token, kind in kinds if kind == gguf.TokenType.CONTROL]
    )
    return tokenizer


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return {
        # Only this class takes tokenizer.json as it is.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        **{role: tokens[fields[f"tokenizer.ggml.{name}_token_id"]] for role, name in roles.items()},
        "chat_template": fields["tokenizer.chat_template"],
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")
