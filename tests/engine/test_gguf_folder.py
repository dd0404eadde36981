"""A GGUF file, the folder made of it and the groups of its blocks are the same model."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from rota.core.errors import ModelError
from rota.engine.folders.gguf_folder import _bfloat16, convert_gguf, group_parts
from rota.engine.quantised.matrices import GroupsFile
from rota.engine.quantised.names import GROUPS_FILE
from tests.engine.tiny_gguf import TOKENS, tiny_llama, write_tiny_gguf


@pytest.mark.parametrize("has_tied_embeddings", [True, False])
def test_the_folder_holds_the_model_that_was_written(has_tied_embeddings: bool, tmp_path: Path):
    model = tiny_llama(has_tied_embeddings)
    write_tiny_gguf(tmp_path / "tiny.gguf", model)
    convert_gguf(tmp_path / "tiny.gguf", tmp_path, quiet=True)

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert loaded.config.tie_word_embeddings == has_tied_embeddings
    assert loaded.config.rms_norm_eps == 1e-5
    tokens = torch.arange(40)[None]
    with torch.inference_mode():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_digits_stand_alone_and_special_tokens_are_known(tmp_path: Path):
    write_tiny_gguf(tmp_path / "tiny.gguf", tiny_llama())
    convert_gguf(tmp_path / "tiny.gguf", tmp_path, quiet=True)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("see the 42<|im_end|>").tokens == [*"see", "Ġthe", "Ġ", "4", "2", "<|im_end|>"]
    assert tokenizer.decode(tokenizer.encode("see the 42<|im_end|>").ids) == "see the 42"


def test_transformers_reads_the_tokenizer_as_it_is_written(tmp_path: Path):
    write_tiny_gguf(tmp_path / "tiny.gguf", tiny_llama())
    convert_gguf(tmp_path / "tiny.gguf", tmp_path, quiet=True)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "the 2024 café\n\tdéjà vu 😀"
    assert theirs.encode(text) == ours.encode(text).ids
    assert (theirs.bos_token, theirs.eos_token, theirs.pad_token) == (TOKENS[1], TOKENS[2], TOKENS[2])
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == 2


def test_weights_are_rounded_as_torch_rounds_them():
    weights = np.random.default_rng(0).standard_normal(10_000, dtype=np.float32)
    # Between two bfloat16 values the even one is taken: below, above, and at the sign.
    weights[:4] = [1.00390625, 1.01171875, -1.00390625, 0.0]
    rounded = torch.from_numpy(_bfloat16(weights).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(rounded, torch.from_numpy(weights).bfloat16())


def test_a_file_that_was_cut_short_is_named(tmp_path: Path):
    source = tmp_path / "tiny.gguf"
    write_tiny_gguf(source, tiny_llama())
    whole = source.read_bytes()
    for length in (0, 3, 100, len(whole) // 2, len(whole) - 100):
        source.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"tiny\.gguf is not a whole GGUF file"):
            convert_gguf(source, tmp_path, quiet=True)


def test_a_file_of_another_kind_is_refused(tmp_path: Path):
    write_tiny_gguf(tmp_path / "tiny.gguf", tiny_llama(), pre_tokenizer="llama-bpe")
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre 'llama-bpe'; only 'smollm'"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path, quiet=True)


@pytest.mark.parametrize(("kind", "is_doubled"), [(Kind.Q4_1, False), (Kind.Q8_0, True)])
def test_groups_are_the_weights_of_the_format_s_own_reader(tmp_path, kind, is_doubled):
    weights = np.random.default_rng(0).standard_normal((48, 96), dtype=np.float32)
    data = gguf.quants.quantize(weights, kind)
    save_file(group_parts("w", data, kind, (48, 96)), tmp_path / GROUPS_FILE)

    groups = GroupsFile(tmp_path).find("w")
    assert groups is not None
    found = groups.weights()
    if is_doubled:
        found = sum(found.chunk(2, dim=1))
    expected = torch.from_numpy(gguf.dequantize(data, kind))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_what_is_in_no_groups_of_ours_has_no_parts():
    weights = np.zeros((4, 32), np.float32)
    assert group_parts("w", weights.view(np.uint8), Kind.F32, (4, 32)) == {}
