"""Measures what grammars cost on the host: reading one, masks of many rows, checks, and tokens that grammars force.

python benchmarks/grammar_cost.py [--folder FOLDER] [--vocabulary N] [--output FILE]

FOLDER has a tokenizer, by default that of the built-in model. Times are the least of several rounds, in milliseconds:
on a machine that others use too, what one round is above another is theirs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

from rota.core.grammar import Grammar
from rota.engine.folders.builtin import builtin_model_folder
from rota.grammar import texts
from rota.grammar.grammars import LlGrammars, Vocabulary
from rota.server.access.keys import ANYONE
from rota.server.calls.reading_room import ReadingRoom
from rota.text.tokenizer import Tokenizer

ROWS, ROUNDS = 64, 12
TEXT, WHOLE = {"type": "string"}, {"type": "integer"}


def fields(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


ADDRESS = fields(street=TEXT, zip={"type": "string", "pattern": "^[0-9]{5}$"})
# Schemas of ordinary size, and what a model may answer.
CASES: list[tuple[dict[str, Any], Any]] = [
    (fields(city=TEXT, country=TEXT, population=WHOLE), {"city": "Paris", "country": "France", "population": 2100000}),
    (
        fields(name=TEXT, age=WHOLE, tags={"type": "array", "items": TEXT}, address=ADDRESS),
        {"name": "Ada", "age": 36, "tags": ["maths"], "address": {"street": "12 St James Square", "zip": "10115"}},
    ),
    (
        fields(sentiment={"enum": ["positive", "negative"]}, confidence={"type": "number"}),
        {"sentiment": "positive", "confidence": 0.93},
    ),
    (
        {"type": "array", "items": fields(id=WHOLE, title=TEXT, is_done={"type": "boolean"})},
        [{"id": 1, "title": "buy milk", "is_done": False}, {"id": 2, "title": "write it down", "is_done": True}],
    ),
    (
        fields(title=TEXT, summary=TEXT),
        {"title": "Turns", "summary": "Each adapter gets its turn, so that no client waits while others are served."},
    ),
]


def numbered(number: int) -> Grammar:
    """One of many grammars, each with another text."""
    schema, _ = CASES[number % len(CASES)]
    return texts.json_schema({**schema, "title": str(number)}, "json")


def least_ms(act: Callable[[int], object], rounds: int = ROUNDS) -> float:
    times = []
    for number in range(rounds):
        started_at = time.perf_counter()
        act(number)
        times.append(time.perf_counter() - started_at)
    return round(1e3 * min(times), 3)


def masks_ms(grammars: LlGrammars, tokenizer: Tokenizer, vocabulary: int) -> float:
    """Masks of 64 rows, each within an answer of a grammar of its own."""
    words = -(-vocabulary // 32)
    masks = memoryview(bytearray(4 * words * ROWS)).cast("I", (ROWS, words))

    def one_round(number: int) -> float:
        matchers = [grammars.matcher(numbered(row)) for row in range(ROWS)]
        for row, matcher in enumerate(matchers):
            answer = tokenizer.encode(json.dumps(CASES[row % len(CASES)][1]), add_special_tokens=False)
            matcher.accept(answer[: number % len(answer)])
        started_at = time.perf_counter()
        grammars.fill([(matcher, row) for row, matcher in enumerate(matchers)], masks)
        return time.perf_counter() - started_at

    one_round(0)
    return round(1e3 * sum(map(one_round, range(1, 20))) / 19, 3)


async def checks_ms(folder: Path) -> dict[str, float]:
    """A check in another process, and a verdict that is known."""
    checks = ReadingRoom(folder)

    async def took_ms(grammar: Grammar) -> float:
        started_at = time.perf_counter()
        await checks.check(grammar, ANYONE.name)
        return round(1e3 * (time.perf_counter() - started_at), 3)

    try:
        first = await took_ms(numbered(0))
        new = min([await took_ms(numbered(number)) for number in range(1, ROUNDS)])
        known = min([await took_ms(numbered(number)) for number in range(1, ROUNDS)])
    finally:
        await checks.close()
    return {"first check, with the start of the process": first, "check": new, "check of a known grammar": known}


def compact(grammar: Grammar) -> Grammar:
    """The grammar of the same JSON, with one space behind a comma and a colon, and no other blanks."""
    written = json.loads(grammar.text)
    written["grammars"][0]["json_schema"]["x-guidance"] = {"item_separator": ", ", "key_separator": ": "}
    written["grammars"][0]["json_schema"]["x-guidance"]["whitespace_flexible"] = False
    return Grammar(json.dumps(written))


def forced(vocabulary: Vocabulary, tokenizer: Tokenizer, form: Callable[[Grammar], Grammar]) -> dict[str, float]:
    """How many of the answers' tokens a grammar leaves no choice about, and how many stand in a row."""
    tokens = runs = spelled = 0
    for schema, answer in CASES:
        matcher = vocabulary.matcher(form(texts.json_schema(schema, "json")))
        rest = list(tokenizer.encode(json.dumps(answer), add_special_tokens=False))
        spelled += len(rest)
        while rest:
            run = matcher.compute_ff_tokens()
            is_forced = bool(run) and run == rest[: len(run)]
            tokens, runs = tokens + is_forced * len(run), runs + is_forced
            count = len(run) if is_forced else 1
            assert matcher.consume_tokens(rest[:count])
            rest = rest[count:]
    return {"share": round(tokens / spelled, 3), "in a row": round(tokens / max(runs, 1), 2)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--vocabulary", type=int)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    folder = args.folder or builtin_model_folder(quiet=True)
    tokenizer = Tokenizer(folder)
    size = args.vocabulary or tokenizer.ids
    vocabulary = Vocabulary(tokenizer, size)
    grammars = LlGrammars(lambda: tokenizer, size)
    result: dict[str, Any] = {
        "date": str(date.today()),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "tokens": size,
        "vocabulary": least_ms(lambda _: Vocabulary(tokenizer, size), 2),
        "new grammar": least_ms(lambda number: vocabulary.matcher(numbered(number))),
        "known grammar": least_ms(lambda _: grammars.matcher(numbered(0))),
        f"masks of {ROWS} rows": masks_ms(grammars, tokenizer, size),
        **asyncio.run(checks_ms(folder)),
        "forced tokens": forced(vocabulary, tokenizer, lambda grammar: grammar),
        "forced tokens without free blanks": forced(vocabulary, tokenizer, compact),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
