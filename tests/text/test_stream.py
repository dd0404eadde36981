"""One request's text: tokens in, whole characters out, up to a stop string."""

from __future__ import annotations

import tokenizers

from rota.text.stream import Piece, TextStream
from rota.text.tokenizer import Tokenizer
from tests.text.conftest import Write


def test_a_stop_string_that_is_spread_over_bytes_of_a_character_stops_the_text(
    byte_level: tokenizers.Tokenizer, write: Write
):
    tokenizer = Tokenizer(write(byte_level))
    stream = TextStream(tokenizer, stop=("🐑!",))
    pieces = [stream.push([token]) for token in tokenizer.encode("a🐑 b🐑! c")]
    assert "".join(piece.text for piece in pieces) == "a🐑 b"
    assert pieces[-1] == stream.finish() == Piece("", is_stopped=True)
    assert not pieces[0].is_stopped


def test_the_last_piece_gives_out_what_was_held_back(byte_level: tokenizers.Tokenizer, write: Write):
    tokenizer = Tokenizer(write(byte_level))
    stream = TextStream(tokenizer, stop=("the end",))
    pieces = [stream.push([token]) for token in (*tokenizer.encode("in the e"), byte_level.token_to_id("ð"))]
    assert "".join(piece.text for piece in pieces) == "in "
    assert stream.finish() == Piece("the e\ufffd", is_stopped=False)


def test_a_completion_keeps_the_space_after_its_prompt_and_an_answer_has_none(
    sentencepiece: tokenizers.Tokenizer, write: Write
):
    tokenizer = Tokenizer(write(sentencepiece))
    the = [sentencepiece.token_to_id("▁the")]
    assert TextStream(tokenizer).push(the).text == " the"
    assert TextStream(tokenizer, is_continuation=False).push(the).text == "the"
