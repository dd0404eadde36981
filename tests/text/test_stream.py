"""One request's text: tokens in, whole characters out, and no part of a stop string is ever let through."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.core.request import SamplingParams
from rota.text.stream import StopWatcher, TextOptions, TextStream
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


# ── stop strings ──────────────────────────────────────────────────────────────────────────────────────────────────────

# Few letters, so that stop strings overlap each other and themselves.
LETTERS = "ab"
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=4).map(tuple)
PIECES = st.lists(st.text(LETTERS, max_size=4), max_size=15)


def cut(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """What a stop string means: read letter by letter, and end where one is complete."""
    for end in range(1, len(text) + 1):
        complete = [string for string in stop if text[:end].endswith(string)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=100)
@given(pieces=PIECES, stop=STOPS)
def test_the_text_ends_before_the_stop_string_that_is_complete_first(pieces: list[str], stop: tuple[str, ...]):
    watcher = StopWatcher(stop)
    text = "".join(watcher.push(piece) for piece in pieces) + watcher.finish()
    assert (text, watcher.matched) == cut("".join(pieces), stop)


@settings(max_examples=100)
@given(pieces=PIECES, stop=STOPS)
def test_only_the_beginning_of_a_stop_string_is_held_back(pieces: list[str], stop: tuple[str, ...]):
    watcher = StopWatcher(stop)
    seen = given_out = ""
    for piece in pieces:
        seen += piece
        given_out += watcher.push(piece)
        if watcher.matched is not None:
            break
        held = seen.removeprefix(given_out)
        assert held == "" or any(string.startswith(held) for string in stop)


@pytest.mark.parametrize(
    ("pieces", "outputs"),
    [
        pytest.param(["a dog\nUs", "er", ": hello"], ["a dog", "", ""], id="spread over three tokens"),
        pytest.param(["a dog\nUs", "ed"], ["a dog", "\nUsed"], id="begun and not meant"),
        pytest.param(["\nUs\nUs", "er: no"], ["\nUs", ""], id="begun twice"),
        pytest.param(["yes\nUser: no"], ["yes"], id="in the middle of a piece"),
    ],
)
def test_a_stop_string_is_seen_across_token_borders(pieces: list[str], outputs: list[str]):
    watcher = StopWatcher(("\nUser:",))
    assert [watcher.push(piece) for piece in pieces] == outputs


def test_after_a_stop_string_nothing_is_let_through():
    watcher = StopWatcher(("stop",))
    assert watcher.push("go stop go") == "go "
    assert watcher.matched == "stop"
    assert watcher.push("go") == watcher.finish() == ""


def test_without_stop_strings_nothing_is_held_back():
    assert StopWatcher(()).push("any text") == "any text"


@settings(max_examples=80)
@given(pieces=PIECES, stop=STOPS)
def test_a_stop_string_that_is_kept_is_the_end_of_the_text(pieces: list[str], stop: tuple[str, ...]):
    watcher = StopWatcher(stop, keeps_stop=True)
    text = "".join(watcher.push(piece) for piece in pieces) + watcher.finish()
    assert text == "".join(text for text in cut("".join(pieces), stop) if text)


@settings(max_examples=80)
@given(early=PIECES, late=PIECES, stop=STOPS)
def test_text_that_comes_too_early_does_not_stop_and_none_of_it_is_lost(
    early: list[str], late: list[str], stop: tuple[str, ...]
):
    watcher = StopWatcher(stop)
    text = "".join(watcher.push(piece, may_stop=False) for piece in early)
    assert watcher.matched is None
    text += "".join(watcher.push(piece) for piece in late) + watcher.finish()
    assert text + (watcher.matched or "") == "".join(early + late)[: len(text) + len(watcher.matched or "")]
    assert watcher.matched or text == "".join(early + late)
