"""A tokenizer does what its folder says, and says what is wrong with the folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders

from rota.core.errors import ModelError, RequestError
from rota.text.tokenizer import Tokenizer
from tests.processes import run_program
from tests.text.conftest import CHAT_TEMPLATE, Write


def test_text_gets_the_special_tokens_of_tokenizer_json(sentencepiece: tokenizers.Tokenizer, write: Write):
    tokenizer = Tokenizer(write(sentencepiece))
    assert tokenizer.encode("the") == (1, sentencepiece.token_to_id("▁the"))
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"


def test_text_may_be_had_without_special_tokens(sentencepiece: tokenizers.Tokenizer, write: Write):
    tokenizer = Tokenizer(write(sentencepiece))
    assert tokenizer.encode("the", add_special_tokens=False) == (sentencepiece.token_to_id("▁the"),)


def test_no_token_stands_for_more_characters_than_the_longest(byte_level: tokenizers.Tokenizer, write: Write):
    assert Tokenizer(write(byte_level)).longest_token == len("<été à la mer>")


@pytest.mark.parametrize(
    ("flags", "around"),
    [
        ({"add_bos_token": False}, ((), ())),
        ({"add_bos_token": True}, ((1,), ())),
        ({"add_bos_token": True, "add_eos_token": True}, ((1,), (2,))),
        ({"add_bos_token": None}, ((1,), ())),
    ],
)
def test_tokenizer_config_overrules_tokenizer_json_about_bos_and_eos(
    flags: dict[str, bool | None],
    around: tuple[tuple[int, ...], tuple[int, ...]],
    sentencepiece: tokenizers.Tokenizer,
    write: Write,
):
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, **flags}
    tokenizer = Tokenizer(write(sentencepiece, tokenizer_config=config))
    before, after = around
    assert tokenizer.encode("the") == (*before, sentencepiece.token_to_id("▁the"), *after)


def test_a_length_limit_saved_with_the_tokenizer_cuts_no_prompt(byte_level: tokenizers.Tokenizer, write: Write):
    limited = tokenizers.Tokenizer.from_str(byte_level.to_str())
    limited.enable_truncation(max_length=2)
    limited.enable_padding(length=8)
    tokenizer = Tokenizer(write(limited))
    for text in ("a", "longer than two tokens"):
        assert tokenizer.encode(text) == tuple(byte_level.encode(text).ids)


def test_all_tokens_that_end_an_answer_are_collected(byte_level: tokenizers.Tokenizer, write: Write):
    folder = write(
        byte_level,
        tokenizer_config={"eos_token": "</s>"},
        generation_config={"eos_token_id": [7, 9]},
        config={"eos_token_id": 5},
    )
    assert Tokenizer(folder).eos_ids == {1, 7, 9}
    (folder / "generation_config.json").unlink()
    assert Tokenizer(folder).eos_ids == {1, 5}


def test_a_token_id_without_a_token_has_no_text(byte_level: tokenizers.Tokenizer, write: Write):
    tokenizer = Tokenizer(write(byte_level))
    assert tokenizer.vocab_size == byte_level.get_vocab_size()
    assert tokenizer.decode([*tokenizer.encode("end"), tokenizer.vocab_size + 10]) == "end"


def test_half_a_surrogate_pair_is_refused(byte_level: tokenizers.Tokenizer, write: Write):
    with pytest.raises(RequestError, match="surrogate") as caught:
        Tokenizer(write(byte_level)).encode("half \ud83d")
    assert caught.value.fault.param == "prompt"


def test_a_folder_without_tokenizer_json_is_read_through_transformers(byte_level: tokenizers.Tokenizer, tmp_path: Path):
    model = json.loads(byte_level.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(merge) for merge in model["merges"]))
    config = {"tokenizer_class": "GPT2Tokenizer", "unk_token": "<s>", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("the café") == tuple(byte_level.encode("the café").ids)
    assert tokenizer.decode(tokenizer.encode("the café")) == "the café"


def test_a_missing_folder_is_named(tmp_path: Path):
    with pytest.raises(ModelError, match=r"no model folder at .*/nowhere"):
        Tokenizer(tmp_path / "nowhere")


def test_a_folder_without_any_tokenizer_says_what_to_add(tmp_path: Path):
    with pytest.raises(ModelError, match=r"add the model's tokenizer\.json"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ['{"version": "1.0", "mod', "[]"])
def test_a_broken_file_is_named(name: str, content: str, byte_level: tokenizers.Tokenizer, write: Write):
    folder = write(byte_level)
    (folder / name).write_text(content)
    with pytest.raises(ModelError, match=rf"/{name} is not .*; restore it"):
        Tokenizer(folder)


def test_a_decoder_that_rewrites_text_is_refused(words: tokenizers.Tokenizer, write: Write):
    rewriting = tokenizers.Tokenizer.from_str(words.to_str())
    rewriting.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match=r"WordPiece.*byte-level and sentencepiece"):
        Tokenizer(write(rewriting))


def test_neither_tokens_nor_chats_need_torch(byte_level: tokenizers.Tokenizer, write: Write):
    folder = write(byte_level, tokenizer_config={"chat_template": CHAT_TEMPLATE})
    program = f"""
import sys
import rota.text.stream
from rota.text.tokenizer import Tokenizer
tokenizer = Tokenizer({str(folder)!r})
tokenizer.decode(tokenizer.encode("the cat"))
assert "transformers" not in sys.modules
tokenizer.apply_chat_template([{{"role": "user", "content": "hello"}}])
assert "torch" not in sys.modules
"""
    run_program([sys.executable, "-c", program])
