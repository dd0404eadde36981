"""Small tokenizers of every kind that models of the Llama family bring, as folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

Write = Callable[..., Path]

# Rendered by hand in the tests: "<s>" once, then every message on a line of its own.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """As Llama 3, Qwen and SmolLM2 have it; also a token added by hand that is not spelled in bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the café là-bas, the 😀 and the 叫 of the wild"] * 3, trainer)
    tokenizer.add_tokens([AddedToken("<été à la mer>"), AddedToken("<tool>")])
    return tokenizer


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    """As Llama 2 and Mistral have it: "▁" for a space, a space before the text, bytes for rare characters."""
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("h", "e"), ("▁", "▁")]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrst"]
    tokens += ["é", "叫", *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(tokens)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    return tokenizer


@pytest.fixture(scope="session")
def words() -> Tokenizer:
    """No decoder: tokens are words."""
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "one": 1, "two": 2, "three": 3}, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a model folder: a tokenizer and, by name, the content of JSON files beside it."""

    def write(tokenizer: Tokenizer, **files: dict[str, Any]) -> Path:
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path

    return write
