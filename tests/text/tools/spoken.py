"""What a parser hears of a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from rota.text.parsed_delta import ParsedDelta
from rota.text.tools.formats import FORMATS
from rota.text.tools.parser import ToolParser

NAMES = frozenset({"weather", "clock-2"})

Calls = list[tuple[str, str]]


def heard(form: str, *pieces: str) -> tuple[str, Calls]:
    """The content, and the calls with their arguments."""
    said = sum(said_by(form, pieces), ParsedDelta())
    return said.content, [(call.name, call.arguments) for call in said.whole_calls]


def said_by(form: str, pieces: Sequence[str]) -> list[ParsedDelta]:
    """After each piece, and at the end."""
    parser = ToolParser(FORMATS[form], NAMES, lambda: "call_1")
    return [*map(parser.push, pieces), parser.finish()]
