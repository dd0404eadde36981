"""A talk is a conversation whose next answer may come from another adapter."""

from __future__ import annotations

import difflib
import json
import sys
import time
import unicodedata
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

from rota.commands.server_call import CallError, call, sentence_of

# ── remote ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# A remote server is asked over HTTP, and its answer read as it comes.

# A stream has a sign of life every few seconds.
STREAM_S = 300.0


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """A part of an answer. `tokens` counts all tokens of the answer so far, if the server tells."""

    text: str = ""
    thought: str = ""
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Remote:
    """A server with OpenAI's routes."""

    url: str
    api_key: str | None = None

    def models(self) -> list[str]:
        """The base model's name, then its adapters. Raises CallError if the server does not answer."""
        with call(self.url, self.api_key, "/v1/models") as response:
            try:
                return [str(model["id"]) for model in json.load(response)["data"]]
            except (ValueError, KeyError, TypeError) as error:
                raise CallError(f"What answers at {self.url} is no server with OpenAI's routes.") from error

    def answer(self, model: str, messages: Sequence[dict[str, str]], options: dict[str, Any]) -> Generator[AnswerPiece]:
        """The answer to a conversation as it comes. Raises CallError; closing the generator ends the answer."""
        # No field that only some servers know.
        usage = {"include_usage": True}
        body = {"model": model, "messages": list(messages), "stream": True, "stream_options": usage, **options}
        with call(self.url, self.api_key, "/v1/chat/completions", body, STREAM_S) as response:
            for line in response:
                if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                    yield _piece(data)


def _piece(data: bytes) -> AnswerPiece:
    try:
        event = json.loads(data)
    except ValueError:
        raise CallError("The server sent something that is not JSON.") from None
    if "error" in event:
        raise CallError(sentence_of(data) or "The answer failed.")
    delta = (event.get("choices") or [{}])[0].get("delta") or {}
    tokens = (event.get("usage") or {}).get("completion_tokens")
    return AnswerPiece(
        delta.get("content") or "", delta.get("reasoning_content") or delta.get("reasoning") or "", tokens
    )


# ── screen ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# A screen reads lines and shows answers: with colours and a prompt on a terminal, as plain lines otherwise.

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


HELP = """\
/adapters       who can answer
/adapter NAME   let NAME, or the one with this number, answer from now on
/system TEXT    what the model is told before the conversation; without TEXT: nothing
/clear          begin again
/help           this list
/quit           end; so does ctrl-D
A line that ends in \\ goes on in the next one; a message that begins with / is written as //."""


class Talk:
    """What was said so far, and who answers next."""

    def __init__(self, remote: Remote, screen: Screen, options: dict[str, Any], system: str | None = None) -> None:
        self._remote = remote
        self._screen = screen
        self._options = options
        self._system = system
        self._said: list[dict[str, str]] = []
        self._models = remote.models()
        self._model = self._models[0]
        self.has_failed = False
        self._commands: dict[str, Callable[[str], None]] = {
            "adapters": lambda _: self.list_models(),
            "adapter": self.choose,
            "system": self._set_system,
            "clear": lambda _: self._clear(),
            "help": lambda _: self._screen.note(HELP),
        }

    def begin(self) -> None:
        """Say who can answer. On a terminal only: a pipe knows what it wants."""
        if self._screen.is_terminal:
            self.list_models()
            self._screen.note("/help lists the commands, ctrl-C stops an answer, ctrl-D ends the chat.")

    def run(self) -> None:
        """Read and answer until the input ends, or /quit. A ctrl-C ends only what is going on."""
        while True:
            try:
                line = self._screen.ask(f"{self._model}> ")
                if line is None or line == "/quit":
                    return
                if line:
                    self.take(line)
            except KeyboardInterrupt:
                self._screen.end_line()
                self._screen.note("/quit or ctrl-D ends the chat.")

    def take(self, line: str) -> None:
        """A message or a command. An error is a sentence on the screen."""
        try:
            if line.startswith("/") and not line.startswith("//"):
                self._obey(*line[1:].partition(" ")[::2])
            else:
                self._answer(line.removeprefix("/") if line.startswith("//") else line)
        except CallError as error:
            self.has_failed = True
            self._screen.fail(str(error))

    def choose(self, name: str) -> None:
        """Let another model answer. Raises CallError if the server has none of this name."""
        name = name.strip()
        self._models = self._remote.models()  # adapters come and go
        if name.isdigit() and name not in self._models and int(name) < len(self._models):
            name = self._models[int(name)]
        if name not in self._models:
            near = difflib.get_close_matches(name, self._models, n=1)
            hint = f"do you mean {near[0]}?" if near else f"there are {', '.join(self._models)}."
            raise CallError(f"The server has no '{name}'; {hint}" if name else f"Name an adapter; {hint}")
        self._model = name
        self._screen.note(f"{name} answers from now on.")

    def list_models(self) -> None:
        self._models = self._remote.models()
        for number, name in enumerate(self._models):
            kind = " (base model)" if number == 0 else ""
            self._screen.note(f"{'*' if name == self._model else ' '} {number}  {name}{kind}")

    def _obey(self, word: str, rest: str) -> None:
        if word not in self._commands:
            raise CallError(f"There is no command /{word}; /help lists the commands.")
        self._commands[word](rest)

    def _set_system(self, text: str) -> None:
        self._system = text.strip() or None
        self._screen.note("The model is told so before every answer." if self._system else "The model is told nothing.")

    def _clear(self) -> None:
        self._said.clear()
        self._screen.note("The conversation begins again.")

    def _answer(self, text: str) -> None:
        asked = [*self._said, {"role": "user", "content": text}]
        system = [{"role": "system", "content": self._system}] if self._system else []
        clock = AnswerClock()
        answer = ""
        try:
            with closing(self._remote.answer(self._model, [*system, *asked], self._options)) as pieces:
                for piece in clock.watch(pieces):
                    answer += piece.text
                    self._screen.think(piece.thought)
                    self._screen.say(piece.text)
        except KeyboardInterrupt:
            clock.is_stopped = True
        finally:
            # What was said before an end by error or by hand is part of the conversation.
            if answer:
                self._screen.end_line()
                self._said = [*asked, {"role": "assistant", "content": answer}]
        self._screen.note(f"({self._model}: {clock})")


class AnswerClock:
    """When the tokens of an answer came."""

    def __init__(self) -> None:
        self._asked_at = time.monotonic()
        self._first_at: float | None = None
        self._last_at = self._asked_at
        self._tokens = 0
        self.is_stopped = False

    def watch(self, pieces: Iterator[AnswerPiece]) -> Iterator[AnswerPiece]:
        for piece in pieces:
            if piece.text or piece.thought:
                self._last_at = time.monotonic()
                self._first_at = self._first_at or self._last_at
                # A server that does not count has one token an event.
                self._tokens += 1
            self._tokens = self._tokens if piece.tokens is None else piece.tokens
            yield piece

    def __str__(self) -> str:
        stopped = ["stopped"] if self.is_stopped else []
        if self._first_at is None:
            return ", ".join(stopped or ["no text"])
        told = [f"first token after {(self._first_at - self._asked_at) * 1000:.0f} ms"]
        if self._tokens > 1 and (took := self._last_at - self._first_at) > 0:
            told.append(f"{(self._tokens - 1) / took:.1f} tokens a second")
        return ", ".join([*told, f"{self._tokens} tokens", *stopped])
