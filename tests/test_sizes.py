"""The package stays in small pieces: files, functions, and errors that are caught by name."""

from __future__ import annotations

import ast
import statistics
import tokenize
from collections.abc import Iterator

import pytest

from tests.weight import lines_of_files, lines_of_functions, names_used_twice, p90, parsed

# A file is a concept, with everything that is needed to understand it: not a piece of one, and not several.
MOST_LINES_OF_A_FILE, LEAST_MEDIAN, MOST_MEDIAN = 500, 110, 170
MOST_LINES_OF_A_FUNCTION, P90_LINES_OF_A_FUNCTION = 60, 16

# Where an error of any kind is the last thing that is heard, and why it must be caught there.
BORDERS = {
    "runtime/process.py": "the engine's process ends, and its supervisor must hear why",
    "runtime/in_process.py": "the engine's thread ends, and callers that wait must hear why",
    "runtime/ranks/follower.py": "a follower's process ends, and its leader must hear why",
    "runtime/cluster/driver.py": "Ray, or an engine elsewhere, fails in ways that nothing lists: the front must hear",
    "runtime/cluster/joining.py": "Ray fails in ways that it does not list",
    "runtime/supervisor.py": "the supervisor's thread ends, and requests that are open must hear why",
    "observe/logs.py": "the server's process ends, and its log must say why",
    "engine/lora/files/reader.py": "a thread reads adapters, and one that cannot be read must not end it",
    "engine/lora/files/checks.py": "an adapter that cannot be checked is refused, and the others are known",
    "engine/lora/loader.py": "a thread copies adapters, and one that cannot be copied must not end it",
    "engine/lora/host.py": "threads read an adapter together, and the thread that waits raises an error",
    "engine/weights/read_ahead.py": "a thread reads weights, and the thread that takes them raises its error",
    "engine/folders/hub.py": "a hub's library fails in ways that it does not list",
    "text/tokenizer.py": "two libraries fail in ways that they do not list",
    "text/chat.py": "a chat template is a program that comes with a model",
    "runtime/room/worker.py": "a job fails, and whoever asked must hear why",
    "server/streams.py": "an observer may come from outside, and clients must get their tokens anyway",
}


def longest(lines: dict[str, int], most: int) -> dict[str, int]:
    """What is longer than `most`, the longest first."""
    return {name: count for name, count in sorted(lines.items(), key=lambda one: -one[1]) if count > most}


def test_no_file_is_longer_than_500_lines():
    assert not longest(lines_of_files(), MOST_LINES_OF_A_FILE)


def test_the_middle_file_has_110_to_170_lines():
    assert LEAST_MEDIAN <= statistics.median(lines_of_files().values()) <= MOST_MEDIAN


def test_no_function_is_longer_than_60_lines():
    assert not longest(lines_of_functions(), MOST_LINES_OF_A_FUNCTION)


def test_nine_functions_in_ten_have_at_most_16_lines():
    assert p90(lines_of_functions()) <= P90_LINES_OF_A_FUNCTION


def test_a_class_name_stands_for_one_thing():
    assert names_used_twice() == {}


def is_broad(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in kinds)


def raises_on(handler: ast.ExceptHandler) -> bool:
    """Does it do something and let the same error pass?"""
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def broad_handlers(tree: ast.Module) -> Iterator[ast.ExceptHandler]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and is_broad(node))


def comment_lines(text: str) -> set[int]:
    """The numbers of the lines with a comment that is more than a word to a tool."""
    lines = iter(text.splitlines(keepends=True))
    return {
        token.start[0]
        for token in tokenize.generate_tokens(lambda: next(lines, ""))
        if token.type == tokenize.COMMENT and not token.string.startswith(("# noqa", "# type:", "# fmt:"))
    }


def without_reason(text: str) -> list[int]:
    """Where an error of any kind is caught without a comment there or right above."""
    lines = [node.lineno for node in broad_handlers(ast.parse(text))]
    commented = comment_lines(text) if lines else set()
    return [line for line in lines if not {line, line - 1} & commented]


def test_an_error_of_any_kind_is_caught_only_with_a_reason():
    missing = {path: found for path, (text, _) in parsed().items() if (found := without_reason(text))}
    assert not missing, "say on the line or above it why every error must be caught there"


def test_an_error_of_any_kind_is_held_back_only_at_borders():
    holding = {
        path for path, (_, tree) in parsed().items() if any(not raises_on(handler) for handler in broad_handlers(tree))
    }
    assert holding == BORDERS.keys(), "catch errors by name; a new border is written into this test with its reason"


@pytest.mark.parametrize("kinds", ["", " Exception as error", " BaseException", " (ValueError, Exception)"])
def test_an_except_without_a_reason_is_found(kinds):
    text = f"try:\n    act()\nexcept{kinds}:\n    pass\n"

    assert without_reason(text) == [3]
    assert without_reason(text.replace("act()", "act()\n# Nothing may hold it up.")) == []
    assert without_reason(text.replace(":\n    pass", ":  # nothing may hold it up\n    pass")) == []
    assert without_reason(text.replace(":\n    pass", ":  # noqa: BLE001\n    pass")) == [3]


def test_an_error_that_is_caught_by_name_needs_no_reason():
    assert without_reason("try:\n    act()\nexcept (OSError, ValueError):\n    pass\n") == []
