"""A model's words by a script: what listeners hear, without a format that a model would need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from rota.server.answer import Part
from rota.server.choices import Choice, Chunk
from rota.text.said import CallPiece, Said
from rota.text.speech import Listener, Speech
from tests.fakes import FakeDevice


@dataclass(frozen=True)
class Scripted(Speech):
    """Says one entry a chunk."""

    says: tuple[Said, ...] = ()

    @classmethod
    def of(cls, *words: str) -> Scripted:
        """`?…` is a thought, `f(…` begins a call, `)` goes on with one, and all else is text."""
        calls = 0
        says = []
        for word in words:
            if word.startswith("?"):
                says.append(Said(reasoning=word[1:]))
            elif word.endswith(")") and "(" not in word:
                says.append(Said(calls=(CallPiece(index=calls - 1, arguments=word[:-1]),)))
            elif "(" in word:
                name, _, arguments = word.rstrip(")").partition("(")
                says.append(
                    Said(calls=(CallPiece(index=calls, call_id=f"call_{calls}", name=name, arguments=arguments),))
                )
                calls += 1
            else:
                says.append(Said(word))
        return cls(says=tuple(says))

    def listener(self) -> Listener:
        return cast(Listener, ScriptedListener(list(self.says)))


@dataclass
class ScriptedListener:
    says: list[Said]

    def push(self, _text: str) -> Said:
        return self.says.pop(0)

    def finish(self) -> Said:
        return Said()


def choice() -> Choice:
    return Choice(0, 3, cast(Any, None))


def part(of: Choice, chunk: Chunk) -> Part:
    return Part(of, chunk)


def prompt_of(device: FakeDevice) -> str:
    """What the model was last asked to continue."""
    seat = [seat for plan in device.plans for seat in plan.seats][-1]
    return bytes(seat.tokens[: seat.prompt_length]).decode()
