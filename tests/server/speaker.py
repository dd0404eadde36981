"""A model that says what the test wants, a byte a token, and what it was asked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer as LibraryTokenizer

from rota.core.config import ServerConfig
from rota.core.request import SamplingParams
from rota.runtime.client import EngineClient
from rota.runtime.registry import Registry
from rota.server.streams import Delta
from rota.text.speech import Speech
from rota.text.tokenizer import Tokenizer
from tests.builders import capacity
from tests.fakes import FakeDevice
from tests.server.applications import made_app, running
from tests.server.engines import engines
from tests.tiny_tokenizer import write_byte_tokenizer

# No text holds it, so it tells where a prompt ends.
ANSWER = "\x03"
TEMPLATE = "{% for message in messages %}{{ message.role }}:{{ message.content }}|{% endfor %}" + ANSWER
CONTEXT = 4000


class Speaker:
    """Says `text` to every prompt, then ends its answer."""

    def __init__(self, template: str = TEMPLATE, special: Sequence[str] = ()) -> None:
        """`special` are special tokens: where the text has one, it is said as one token."""
        self.template = template
        self.text = ""
        self.skipped = 0  # tokens of the prompt behind its mark
        self._special = special
        self._ids: dict[str, int] = {}
        context = capacity(max_sequence_tokens=CONTEXT)
        self.device = FakeDevice(next_token=self._next, capacity=context)

    def write(self, folder: Path) -> Path:
        write_byte_tokenizer(folder)
        (folder / "chat_template.jinja").write_text(self.template)
        library = LibraryTokenizer.from_file(str(folder / "tokenizer.json"))
        library.add_special_tokens(list(self._special))
        library.save(str(folder / "tokenizer.json"))
        self._ids = {token: library.token_to_id(token) or 0 for token in self._special}
        return folder

    @property
    def sampling(self) -> SamplingParams:
        """How the model was last asked."""
        return [seat for plan in self.device.plans for seat in plan.seats][-1].sampling

    @property
    def prompt(self) -> str:
        """What the model was last asked to continue, without special tokens."""
        seat = [seat for plan in self.device.plans for seat in plan.seats][-1]
        return bytes(token for token in seat.tokens[: seat.prompt_length] if token < 256).decode()

    def _next(self, tokens: Sequence[int]) -> int:
        said = len(tokens) - 1 - self.skipped - max(index for index, token in enumerate(tokens) if token == ord(ANSWER))
        tokens = self._tokens()
        return tokens[said] if said < len(tokens) else 2

    def _tokens(self) -> list[int]:
        found, text = [], self.text
        while text:
            token = next((one for one in self._ids if text.startswith(one)), "")
            found += [self._ids[token]] if token else list(text[0].encode())
            text = text[len(token) or 1 :]
        return found


@contextmanager
def speaking(folder: Path, speaker: Speaker, **config: Any) -> Iterator[httpx.Client]:
    registry = Registry("speaker", "/models/speaker")
    device = speaker.device  # held here, so that no other node gets a copy of it
    service = EngineClient(engines(lambda: device), [])
    tokenizer = Tokenizer(speaker.write(folder))
    app = made_app(service, tokenizer, registry, config=ServerConfig(**config), has_grammars=True)
    with running(app) as url, httpx.Client(base_url=url) as client:
        service.wait_until_ready()
        yield client


# ── words that routes sort ────────────────────────────────────────────────────────────────────────────────────────────

# A model that thinks, and calls `f` and `g` in Hermes' form.
SPEECH = Speech(tools="hermes", names=frozenset({"f", "g"}), reasoning="qwen3")


def call_of(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def deltas_of(*texts: str) -> list[Delta]:
    """An answer of one choice, a text a step."""
    parser = SPEECH.parser()
    deltas = [Delta(0, [1], said=parser.push(text)) for text in texts]
    deltas[-1].said += parser.finish()
    deltas[-1].finish_reason = "stop"
    return deltas


def recites(text: str) -> Callable[[Sequence[int]], int]:
    """A model that answers with this text, byte by byte, and ends. Its prompt ends in the template's last `|`."""

    def next_token(tokens: Sequence[int]) -> int:
        said = bytes(token for token in tokens if token > 2).rpartition(b"|")[2]
        answer = text.encode()
        return answer[len(said)] if len(said) < len(answer) else 2

    return next_token


def prompt_of(device: FakeDevice) -> str:
    """What the model was last asked to continue."""
    seat = [seat for plan in device.plans for seat in plan.seats][-1]
    return bytes(seat.tokens[: seat.prompt_length]).decode()


def named_events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """A stream in which every event has its type as its name."""
    events = []
    for packet in response.text.strip().split("\n\n"):
        name, data = packet.splitlines()
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events
