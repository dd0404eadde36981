"""No part of a stop string is ever let through, and nothing else is held for long."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.text.stream import StopWatcher

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
