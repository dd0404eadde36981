"""Text comes in pieces that make the whole, and no piece ends inside a character."""

from __future__ import annotations

import codecs

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rota.text.pieces import Detokenizer, TokenPieces

# The fixtures are tokenizers that no example changes.
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

# Sentencepiece cannot tell "▁" from a space.
UNICODE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"))
CUTS = st.lists(st.integers(0, 5), max_size=40)


def streamed(library: tokenizers.Tokenizer, tokens: list[int], cuts: list[int]) -> str:
    """The text when tokens come in groups as large as `cuts` says, and then one by one."""
    detokenizer = Detokenizer(TokenPieces(library))
    text, at = "", 0
    for size in [*cuts, *[1] * len(tokens)]:
        text += detokenizer.push(tokens[at : at + size])
        at += size
    return text + detokenizer.finish()


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@quick
@given(text=UNICODE, cuts=CUTS)
def test_any_text_comes_back_as_it_went_in(kind: str, text: str, cuts: list[int], request: pytest.FixtureRequest):
    library = request.getfixturevalue(kind)
    assert streamed(library, library.encode(text).ids, cuts) == text


@quick
@given(data=st.data(), cuts=CUTS)
def test_any_byte_level_tokens_read_as_the_library_reads_them(
    byte_level: tokenizers.Tokenizer, data: st.DataObject, cuts: list[int]
):
    tokens = data.draw(st.lists(st.integers(0, byte_level.get_vocab_size() + 3)))
    assert streamed(byte_level, tokens, cuts) == byte_level.decode(tokens)


@quick
@given(data=st.data(), cuts=CUTS)
def test_sentencepiece_tokens_read_as_the_library_reads_them_where_they_are_characters(
    sentencepiece: tokenizers.Tokenizer, data: st.DataObject, cuts: list[int]
):
    whole_tokens = st.integers(259, sentencepiece.get_vocab_size() - 1).map(lambda token: [token])
    byte_tokens = UNICODE.map(lambda text: [3 + byte for byte in text.encode()])
    special_tokens = st.just([1])
    groups = data.draw(st.lists(whole_tokens | byte_tokens | special_tokens))
    tokens = [token for group in groups for token in group]
    assert streamed(sentencepiece, tokens, cuts) == sentencepiece.decode(tokens)


@quick
@given(noise=st.binary(), cuts=CUTS)
def test_byte_tokens_that_are_no_character_cost_only_themselves(
    sentencepiece: tokenizers.Tokenizer, noise: bytes, cuts: list[int]
):
    text = streamed(sentencepiece, [3 + byte for byte in noise], cuts)
    assert text == codecs.decode(noise, "utf-8", "replace").removeprefix(" ")


def test_word_tokens_are_joined_by_spaces(words: tokenizers.Tokenizer):
    assert streamed(words, [0, 1, 2, 0, 3], []) == words.decode([0, 1, 2, 0, 3]) == "one two three"


def test_a_token_added_by_hand_reads_as_it_is_written(byte_level: tokenizers.Tokenizer):
    assert streamed(byte_level, byte_level.encode("le <été à la mer><tool>").ids, []) == "le <été à la mer><tool>"


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_a_character_of_four_bytes_comes_whole_with_its_last_byte(kind: str, request: pytest.FixtureRequest):
    library = request.getfixturevalue(kind)
    alphabet = {"byte_level": "ðŁĲĳ", "sentencepiece": ["<0xF0>", "<0x9F>", "<0x90>", "<0x91>"]}[kind]
    detokenizer = Detokenizer(TokenPieces(library), is_continuation=True)
    assert [detokenizer.push([library.token_to_id(token)]) for token in alphabet] == ["", "", "", "🐑"]


def test_a_character_that_is_never_completed_is_said_at_the_end(byte_level: tokenizers.Tokenizer):
    detokenizer = Detokenizer(TokenPieces(byte_level))
    assert detokenizer.push([byte_level.token_to_id("ð")]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_a_byte_that_cannot_become_a_character_is_said_as_soon_as_that_is_sure(byte_level: tokenizers.Tokenizer):
    detokenizer = Detokenizer(TokenPieces(byte_level))
    assert detokenizer.push([byte_level.token_to_id("ð")]) == ""
    assert detokenizer.push([byte_level.token_to_id("a")]) == "\ufffda"


def test_a_text_that_begins_loses_the_space_put_before_it_and_one_that_continues_keeps_it(
    sentencepiece: tokenizers.Tokenizer,
):
    pieces, the = TokenPieces(sentencepiece), sentencepiece.token_to_id("▁the")
    assert Detokenizer(pieces).push([the, the]) == "the the"
    assert Detokenizer(pieces, is_continuation=True).push([the, the]) == " the the"


def test_a_special_token_before_the_text_does_not_keep_the_space(sentencepiece: tokenizers.Tokenizer):
    detokenizer = Detokenizer(TokenPieces(sentencepiece))
    assert detokenizer.push([1]) == ""
    assert detokenizer.push([sentencepiece.token_to_id("▁the")]) == "the"


def test_a_token_by_itself_is_shown_by_its_text_or_as_a_special_token_is_written(sentencepiece: tokenizers.Tokenizer):
    pieces, no_token = TokenPieces(sentencepiece), sentencepiece.get_vocab_size()
    tokens = [1, sentencepiece.token_to_id("▁the"), 2, no_token]

    assert [pieces.name_of(token) for token in tokens] == ["<s>", " the", "</s>", ""]
