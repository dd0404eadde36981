"""Measures what it costs to tell calls and thoughts from text: microseconds a token, in every format.

python benchmarks/tool_parsing.py [--rounds 30] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path

from rota.text.speech import Speech

# About what a tokenizer makes of English and of JSON: words with the blank before them, and single signs.
TOKENS = re.compile(r" ?\w+|[^\w]")
PROSE = "The weather in Rome is fine today, and the sun shines on the old stones of the city. " * 30
TEXTS = "because it is warm there, and the sun shines on the old stones. " * 12
SAID = {"city": "Rome", "days": 12, "when": ["today", "tomorrow"] * 8, "why": TEXTS, "at": [1, 2.5] * 20}
ARGUMENTS = json.dumps(SAID)
PYTHON = ", ".join(f"{name}={value!r}" for name, value in SAID.items())
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "llama3_json": f'{{"name": "weather", "parameters": {ARGUMENTS}}}',
    "pythonic": f"[weather({PYTHON})]",
    "mistral": f"[TOOL_CALLS]weather{ARGUMENTS}",
    "json": f'[{{"name": "weather", "arguments": {ARGUMENTS}}}]',
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    measured = {name: round(cost_us(speech, text, arguments.rounds), 2) for name, speech, text in cases()}
    report = json.dumps({"microseconds_a_token": measured}, indent=2)
    print(report)
    if arguments.output:
        arguments.output.write_text(report + "\n")


def cases() -> list[tuple[str, Speech, str]]:
    """What is measured: a name, the parsers and the text of an answer."""
    names = frozenset({"weather"})
    thinking = Speech(reasoning="think", is_thinking=True)
    both = Speech(tools="hermes", names=names, reasoning="think", is_thinking=True)
    return [
        ("no parser, prose", Speech(), PROSE),
        *((f"{form}, prose", Speech(tools=form, names=names), PROSE) for form in CALLS),
        *((f"{form}, a call", Speech(tools=form, names=names), text) for form, text in CALLS.items()),
        ("think, thoughts", thinking, PROSE),
        ("think and hermes, thoughts and a call", both, f"{PROSE}</think>\n{CALLS['hermes']}"),
    ]


def cost_us(speech: Speech, text: str, rounds: int) -> float:
    """The least processor time of a round, because other work can only add to it."""
    pieces = TOKENS.findall(text)
    return min(_round_s(speech, pieces) for _ in range(rounds)) / len(pieces) * 1e6


def _round_s(speech: Speech, pieces: list[str]) -> float:
    parser = speech.parser(lambda: "call_1")
    begun_at = time.process_time()
    for piece in pieces:
        parser.push(piece)
    parser.finish()
    return time.process_time() - begun_at


if __name__ == "__main__":
    main()
