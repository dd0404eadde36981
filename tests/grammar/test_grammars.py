"""Matchers follow answers, and masks allow exactly the tokens that may come next."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, pre_tokenizers

from rota.core.errors import ModelError
from rota.grammar import texts
from rota.grammar.grammars import LlGrammars
from rota.text.tokenizer import Tokenizer
from tests.grammar.matching import END, VOCABULARY, WORDS, allowed, byte_grammars
from tests.tiny_tokenizer import write_byte_tokenizer

AB = texts.regex("[ab]c", "regex")


def test_masks_follow_the_answer() -> None:
    matcher = byte_grammars().matcher(AB)
    assert allowed(matcher) == set(b"ab")
    matcher.accept(list(b"a"))
    assert allowed(matcher) == set(b"c")
    matcher.accept(list(b"c"))
    assert allowed(matcher) == {END}
    assert matcher.fault == ""


def test_an_answer_at_its_end_allows_all_and_takes_no_more() -> None:
    matcher = byte_grammars().matcher(AB)
    matcher.accept([*b"ac", END, *b"zzz"])
    assert matcher.fault == ""
    assert len(allowed(matcher)) == 32 * WORDS


def test_a_token_that_the_grammar_forbids_is_a_fault() -> None:
    matcher = byte_grammars().matcher(AB)
    matcher.accept(list(b"zac"))
    assert matcher.fault.startswith('Parser Error: token "z" doesn\'t satisfy the grammar')
    assert len(allowed(matcher)) == 32 * WORDS


def test_equal_grammars_have_matchers_of_their_own() -> None:
    first, second = byte_grammars().matcher(AB), byte_grammars().matcher(texts.regex("[ab]c", "other"))
    first.accept(list(b"a"))
    assert allowed(first) == set(b"c")
    assert allowed(second) == set(b"ab")


def test_each_line_gets_its_own_mask_and_other_lines_stay() -> None:
    grammars = byte_grammars()
    matchers = [grammars.matcher(texts.choice([letter], "choice")) for letter in "xyz"]
    raw = bytearray(b"\x55" * (4 * WORDS * 5))
    masks = memoryview(raw).cast("I", (5, WORDS))
    grammars.fill([(matchers[0], 3), (matchers[1], 0), (matchers[2], 4)], masks)
    lines = [raw[index * 4 * WORDS :][: 4 * WORDS] for index in range(5)]
    assert [int.from_bytes(lines[line], "little") for line in (3, 0, 4)] == [1 << ord(letter) for letter in "xyz"]
    assert lines[1] == lines[2] == b"\x55" * (4 * WORDS)


def test_a_grammar_that_was_forgotten_is_read_again(tmp_path: Path) -> None:
    grammars = LlGrammars(lambda: Tokenizer(write_byte_tokenizer(tmp_path)), VOCABULARY, kept=1)
    for _ in range(2):
        for letter in "xy":
            assert allowed(grammars.matcher(texts.choice([letter], "choice")), grammars) == {ord(letter)}


def save(folder: Path, library: LibraryTokenizer, settings: str = '{"eos_token": "</s>"}') -> Path:
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(settings)
    return folder


def byte_level() -> LibraryTokenizer:
    alphabet = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary = {**alphabet, "</s>": 256, "he": 257, "Ã©": 258, "Ġ{": 259}
    library = LibraryTokenizer(models.BPE(vocabulary, [("h", "e"), ("Ã", "©"), ("Ġ", "{")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["</s>"])
    return library


def sentencepiece() -> LibraryTokenizer:
    pieces = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "h", "e", "he", "▁", "{", "▁{", "é"]
    library = LibraryTokenizer(
        models.BPE({piece: index for index, piece in enumerate(pieces)}, [("h", "e"), ("▁", "{")], byte_fallback=True)
    )
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(["</s>"])
    return library


def words() -> LibraryTokenizer:
    names = ["<unk>", "</s>", "he", "{", "é", "said"]
    library = LibraryTokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(["<unk>", "</s>"])
    return library


@pytest.mark.parametrize(
    "library", [byte_level(), sentencepiece(), words()], ids=["byte-level", "sentencepiece", "plain"]
)
@pytest.mark.parametrize("pattern", [" (he|é)", "( he| é){2}", r" he é \{", "[^a]{6}"])
def test_tokens_stand_for_the_bytes_that_the_text_layer_gives_them(
    library: LibraryTokenizer, pattern: str, tmp_path: Path
) -> None:
    """An answer of the longest tokens that the masks allow spells a text that matches."""
    tokenizer = Tokenizer(save(tmp_path, library))
    (end,) = tokenizer.eos_ids
    vocabulary = tokenizer.ids + 5
    grammars = LlGrammars(lambda: tokenizer, vocabulary)
    grammar = texts.regex(pattern, "regex")
    matcher = grammars.matcher(grammar)
    answer: list[int] = []
    while True:
        tokens = allowed(matcher, grammars, vocabulary)
        assert not matcher.fault, matcher.fault
        assert tokens
        assert max(tokens) < tokenizer.ids
        if end in tokens:
            break
        answer.append(max(tokens, key=lambda token: len(tokenizer.pieces[token])))
        matcher.accept(answer[-1:])

    assert re.fullmatch(pattern, b"".join(tokenizer.pieces[token] for token in answer).decode())


def test_grammars_of_several_parts_work_without_tokens_for_bytes(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save(tmp_path, words()))
    grammars = LlGrammars(lambda: tokenizer, tokenizer.ids)
    grammar = texts.either(
        texts.after_thinking(texts.choice([" he"], "choice"), " {"), texts.choice([" said"], "choice")
    )
    assert allowed(grammars.matcher(grammar), grammars, tokenizer.ids) == {2, 3, 4, 5}


def test_a_text_that_the_tokenizer_cannot_spell_is_a_fault(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save(tmp_path, words()))
    grammars = LlGrammars(lambda: tokenizer, tokenizer.ids)
    matcher = grammars.matcher(texts.choice(["no such word"], "choice"))
    allowed(matcher, grammars, tokenizer.ids)
    assert matcher.fault == "no token of the model can follow"


def test_without_a_token_that_ends_answers_there_are_no_matchers(tmp_path: Path) -> None:
    grammars = LlGrammars(lambda: Tokenizer(save(tmp_path, words(), "{}")), 10)
    with pytest.raises(ModelError, match="names no token that ends an answer"):
        grammars.matcher(AB)


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    grammars = LlGrammars(lambda: Tokenizer(write_byte_tokenizer(tmp_path)), 100)
    with pytest.raises(ModelError, match="The tokenizer has 256 tokens, and the model only 100"):
        grammars.matcher(AB)
