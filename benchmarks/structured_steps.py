"""Measures what grammars and fields about single tokens cost, in the real loop at depth 2.

    python benchmarks/structured_steps.py [--shape llama-8b] [--rows 64] [--tokens 160] [--rounds 3] [--output FILE]

One engine on random weights, six adapters, a byte-level vocabulary of 128,256 tokens that spells JSON. All rows decode
at the same time: without anything, each under a JSON schema of its own, and with each field. Kinds of run take turns,
so a machine that grows slower is slower for all. Then single requests: the first token with a schema that was never
seen, and with one that was.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from h200.assets import make_adapter, make_model
from h200.json_tokenizer import END, VOCABULARY, write_json_tokenizer
from h200.shapes import RANK, SHAPES, Shape
from h200.stage import Stage, milliseconds

from rota.core.adapter import Adapter
from rota.core.config import CacheConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from rota.core.events import Produced
from rota.core.grammar import Grammar, Grammars, Matcher
from rota.core.ids import BASE, AdapterId
from rota.core.request import SamplingParams
from rota.grammar.grammars import LlGrammars
from rota.grammar.texts import json_schema
from rota.text.tokenizer import Tokenizer

SIX = 6
PROMPT = 100
FIRST_TOKENS = 12  # requests of each kind, one after the other
BIASES = 300
STOPS = frozenset({END})

Sampling = Callable[[int], SamplingParams]


def schema_of(number: int) -> dict[str, Any]:
    """Of ordinary size, its own for each number; an answer goes on for as long as anybody measures."""
    about = {
        f"name{number}": {"type": "string", "maxLength": 24},
        "age": {"type": "integer"},
        "score": {"type": "number"},
        f"kind{number}": {"enum": [f"kind {number}", "other", "none"]},
        "is_known": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 4},
        "place": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 16},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["city", "zip"],
            "additionalProperties": False,
        },
    }
    one = {"type": "object", "properties": about, "required": list(about), "additionalProperties": False}
    return {"type": "array", "items": one, "minItems": 1000}


def grammar_of(number: int) -> Grammar:
    return json_schema(schema_of(number), "response_format")


def params(tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=tokens, **fields)


def guided(tokens: int, number: int) -> SamplingParams:
    return params(tokens, grammar=grammar_of(number), stop_token_ids=STOPS)


def kinds_of_run(tokens: int) -> dict[str, Sampling]:
    """By name, what each row's request asks for."""
    biases = tuple((token * 397 % END, 2.0 if token % 2 else -2.0) for token in range(BIASES))
    allowed = tuple(range(0, END, 2))
    fields: dict[str, dict[str, Any]] = {
        "logit_bias": {"logit_bias": biases},
        "allowed_token_ids": {"allowed_token_ids": allowed},
        "min_tokens": {"min_new_tokens": tokens, "stop_token_ids": STOPS},
    }
    fields["all three fields"] = {name: value for one in fields.values() for name, value in one.items()}
    return {
        "nothing": lambda _: params(tokens),
        "schemas": lambda row: guided(tokens, row),
        "schemas for every second": lambda row: guided(tokens, row) if row % 2 else params(tokens),
        **{name: lambda _, given=given: params(tokens, **given) for name, given in fields.items()},
    }


class TimedGrammars:
    """Grammars beside their clock."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self.fills: list[float] = []

    def matcher(self, grammar: Grammar) -> Matcher:
        return self._grammars.matcher(grammar)

    def fill(self, wanted: Sequence[tuple[Matcher, int]], masks: memoryview) -> None:
        started_at = time.perf_counter()
        self._grammars.fill(wanted, masks)
        self.fills.append(time.perf_counter() - started_at)


def start(folder: Path, shape: Shape, rows: int) -> tuple[Stage, TimedGrammars, list[AdapterId]]:
    model = make_model(folder / "model", shape.config | {"vocab_size": VOCABULARY})
    write_json_tokenizer(model)
    make_adapter(folder / "adapter", model, RANK)
    device: Any = "cuda" if torch.cuda.is_available() else "cpu"
    stage = Stage(
        EngineConfig(
            model=ModelConfig(model_path=str(model), load_format="dummy", device=device),
            cache=CacheConfig() if device == "cuda" else CacheConfig(kv_blocks=64 * rows),
            scheduler=SchedulerConfig(max_running_requests=rows, enable_prefix_caching=False),
            lora=LoraConfig(max_loras_per_batch=SIX, max_lora_rank=RANK),
        )
    )
    grammars = TimedGrammars(LlGrammars(lambda: Tokenizer(model), VOCABULARY))
    stage.engine.use_grammars(grammars)
    six = [Adapter(adapter_id=AdapterId(n), name=f"a{n}", path=str(folder / "adapter")) for n in range(1, SIX + 1)]
    stage.add(six)
    return stage, grammars, [adapter.adapter_id for adapter in six]


def measure_runs(
    stage: Stage, grammars: TimedGrammars, adapters: Sequence[AdapterId], rows: int, tokens: int, rounds: int
) -> dict[str, Any]:
    kinds = kinds_of_run(tokens)
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    fills: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(rounds + 1):
        for name, sampling in kinds.items():
            grammars.fills.clear()
            steps = stage.serve(rows, PROMPT, tokens, adapters, sampling=sampling)
            if number:  # the first round compiles, and reads schemas
                seconds[name] += steps
                fills[name] += grammars.fills
    base = statistics.mean(seconds["nothing"])
    return {
        name: {
            "tokens_per_s": round(rows / statistics.mean(steps)),
            "of_nothing": round(base / statistics.mean(steps), 4),
            "step_ms": milliseconds(steps),
            "masks_ms": milliseconds(fills[name]) if fills[name] else None,
        }
        for name, steps in seconds.items()
    }


def first_token_s(stage: Stage, sampling: SamplingParams) -> float:
    """From the request to its first token, on an engine that has nothing else to do."""
    asked_at = time.monotonic()
    stage.serve(1, PROMPT, 2, [BASE], sampling=lambda _: sampling)
    return next(event.at for event in stage.events if isinstance(event, Produced)) - asked_at


def measure_first_tokens(stage: Stage) -> dict[str, Any]:
    fresh = [guided(2, 1000 + number) for number in range(FIRST_TOKENS)]
    kinds = {"nothing": [params(2)] * FIRST_TOKENS, "new_schema": fresh, "cached_schema": fresh}
    return {
        f"{name}_ms": milliseconds([first_token_s(stage, sampling) for sampling in asked])
        for name, asked in kinds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        stage, grammars, adapters = start(Path(scratch), SHAPES[options.shape], options.rows)
        results = {
            "date": date.today().isoformat(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "torch": torch.__version__,
            "start_s": round(stage.start_s, 1),
            "rows": options.rows,
            "runs": measure_runs(stage, grammars, adapters, options.rows, options.tokens, options.rounds),
            "first_token": measure_first_tokens(stage),
        }
        stage.engine.close()
    print(json.dumps(results, indent=2))
    if options.output:
        options.output.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
