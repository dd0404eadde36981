"""One request's text: tokens in, whole characters out, up to a stop string."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers

from rota.core.request import SamplingParams
from rota.text.stream import TextOptions, TextStream
from rota.text.tokenizer import Tokenizer
from tests.text.conftest import Write

PLAIN = SamplingParams()


def test_a_stop_string_that_is_spread_over_bytes_of_a_character_stops_the_text(
    byte_level: tokenizers.Tokenizer, write: Write
):
    tokenizer = Tokenizer(write(byte_level))
    stream = TextStream(tokenizer, SamplingParams(stop=("🐑!",)))
    pieces = [stream.push([token]) for token in tokenizer.encode("a🐑 b🐑! c")]
    assert "".join(pieces) == "a🐑 b"
    assert (pieces[-1], stream.finish(), stream.matched_stop) == ("", "", "🐑!")


def test_the_last_piece_gives_out_what_was_held_back(byte_level: tokenizers.Tokenizer, write: Write):
    tokenizer = Tokenizer(write(byte_level))
    stream = TextStream(tokenizer, SamplingParams(stop=("the end",)))
    pieces = [stream.push([token]) for token in (*tokenizer.encode("in the e"), byte_level.token_to_id("ð"))]
    assert "".join(pieces) == "in "
    assert (stream.finish(), stream.matched_stop) == ("the e\ufffd", None)


def test_a_completion_keeps_the_space_after_its_prompt_and_an_answer_has_none(
    sentencepiece: tokenizers.Tokenizer, write: Write
):
    tokenizer = Tokenizer(write(sentencepiece))
    the = [sentencepiece.token_to_id("▁the")]
    assert TextStream(tokenizer, PLAIN).push(the) == " the"
    assert TextStream(tokenizer, PLAIN, is_continuation=False).push(the) == "the"


def test_a_special_token_is_text_only_if_it_is_to_be_shown(sentencepiece: tokenizers.Tokenizer, write: Write):
    tokenizer = Tokenizer(write(sentencepiece))
    tokens = [sentencepiece.token_to_id(token) for token in ("<s>", "▁the", "</s>", "▁the")]
    end = frozenset({tokens[2]})

    def text(sampling: SamplingParams = PLAIN, **options: Any) -> str:
        return TextStream(tokenizer, sampling, is_continuation=False, options=TextOptions(**options)).push(tokens)

    assert text() == "the the"
    assert text(shows_special=True) == sentencepiece.decode(tokens, skip_special_tokens=False) == "<s> the</s> the"
    assert text(shown=end) == "the</s> the"
    assert text(SamplingParams(stop_token_ids=end), shown=end) == "the</s> the", "the caller asked for this one"


@pytest.mark.parametrize(("keeps_stop", "text"), [(False, " the"), (True, " the</s>")])
def test_the_token_that_ends_an_answer_is_text_only_if_it_is_kept(
    sentencepiece: tokenizers.Tokenizer, write: Write, keeps_stop: bool, text: str
):
    tokenizer = Tokenizer(write(sentencepiece))
    the, end = sentencepiece.token_to_id("▁the"), sentencepiece.token_to_id("</s>")
    sampling = SamplingParams(stop_token_ids=frozenset({end}))
    options = TextOptions(shows_special=True, keeps_stop=keeps_stop)
    assert TextStream(tokenizer, sampling, options=options).push([the, end]) == text


@pytest.mark.parametrize(("min_tokens", "text"), [(0, "a"), (1, "a"), (2, "abca"), (4, "abca"), (5, "abcabc")])
def test_a_stop_string_within_the_first_tokens_does_not_stop(
    sentencepiece: tokenizers.Tokenizer, write: Write, min_tokens: int, text: str
):
    tokenizer = Tokenizer(write(sentencepiece))
    stream = TextStream(tokenizer, SamplingParams(stop=("b",), min_new_tokens=min_tokens))
    said = ""
    for letter in "abcabc":
        said += stream.push([sentencepiece.token_to_id(letter)])
        if stream.matched_stop is not None:
            break
    assert said == text
