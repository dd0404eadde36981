"""Writes a small random model whose tokens are letters: python benchmarks/clients/trl/tiny_model.py FOLDER"""

from __future__ import annotations

import string
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END, UNKNOWN = "<end>", "<unknown>"
LETTERS = [END, UNKNOWN, " ", *string.ascii_lowercase, *string.digits, "?"]


def write_model(folder: Path) -> None:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(LETTERS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=0,
        tie_word_embeddings=False,
        initializer_range=0.1,  # so that its letters differ, and a few steps of training change which come
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def write_tokenizer(folder: Path) -> None:
    vocabulary = {letter: number for number, letter in enumerate(LETTERS)}
    library = Tokenizer(models.WordLevel(vocabulary, UNKNOWN))
    library.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    library.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=library, eos_token=END, unk_token=UNKNOWN)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}?{% endfor %}"
    # How TRL reads an answer: the templates that it knows are those of larger models.
    answer = {"close_pattern": f"{END}|$", "content": "text"}
    tokenizer.response_template = {
        "defaults": {"role": "assistant"}, "start_anchor": "?", "fields": {"content": answer},
    }  # fmt: skip
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
    write_tokenizer(Path(sys.argv[1]))
