"""What a model says and what it was asked, for tests of routes that sort its words."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from rota.server.streams import Delta
from rota.text.speech import Speech
from tests.fakes import FakeDevice

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
