"""A screen reads lines and shows answers: with colours and a prompt on a terminal, as plain lines otherwise."""

from __future__ import annotations

import sys
import unicodedata
from contextlib import suppress

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_KEPT = "\n\t"


class Screen:
    """Answers go to standard output; notes and errors go to standard error, so that a pipe has answers alone."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        if self.is_terminal:
            with suppress(ImportError):  # then lines can be edited and repeated
                import readline  # noqa: F401

    def ask(self, prompt: str) -> str | None:
        """The next line, without spaces around it. None at the end of the input. A backslash at the end goes on."""
        lines: list[str] = []
        while True:
            line = self._line(prompt if not lines else "... ")
            if line is None:
                return "\n".join(lines) if lines else None
            if not line.endswith("\\"):
                return "\n".join([*lines, line]).strip()
            lines.append(line[:-1])

    def _line(self, prompt: str) -> str | None:
        try:
            # Only a terminal has a prompt, and `input` is what readline works in.
            if self.is_terminal:
                return input(prompt)
            return line.rstrip("\n") if (line := sys.stdin.readline()) else None
        except EOFError:
            return None

    def say(self, text: str) -> None:
        """A part of an answer."""
        print(self._harmless(text), end="", flush=True)

    def think(self, text: str) -> None:
        """A part of a model's thoughts. A pipe has answers alone."""
        if text and self.is_terminal:
            print(f"{_DIM}{self._harmless(text)}{_PLAIN}", end="", flush=True)

    def end_line(self) -> None:
        print(flush=True)

    def note(self, text: str) -> None:
        """A sentence about the chat."""
        print(f"{_DIM}{text}{_PLAIN}" if self.is_terminal else text, file=sys.stderr, flush=True)

    def fail(self, sentence: str) -> None:
        print(f"rota: {sentence}", file=sys.stderr, flush=True)

    def _harmless(self, text: str) -> str:
        """A model may write characters that would command the terminal; they are shown as one that does not."""
        if not self.is_terminal:
            return text
        return "".join(
            one if one in _KEPT or unicodedata.category(one) != "Cc" else "\N{REPLACEMENT CHARACTER}" for one in text
        )
