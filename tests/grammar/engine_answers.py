"""A tiny random model with adapters answers requests with grammars, alone or mixed, at depth 1 or 2."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal

import jsonschema

from rota import LLM, SamplingParams
from rota.core.grammar import Grammar
from rota.grammar import texts
from rota.llm.llm import Completion
from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.model_factory import make_tiny_model
from tests.grammar.formats import FORMATS
from tests.grammar.matching import byte_grammars
from tests.tiny_tokenizer import write_byte_tokenizer

Depth = Literal[1, 2]
ADAPTERS = ("one", "two", "three")
MOST_TOKENS = 220
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "seed": 7},
    "sampled with penalties": {"temperature": 1.5, "seed": 5, "top_p": 0.9, "frequency_penalty": 0.5},
}


@cache
def folder() -> Path:
    made = Path(mkdtemp())
    model = make_tiny_model(made, "smollm2")
    for name in ADAPTERS:
        make_adapter(made / name, model)
    return write_byte_tokenizer(made)


@cache
def tiny_llm(depth: Depth) -> LLM:
    """Fewer slots than adapters, and turns that are over at once."""
    return LLM(
        folder(),
        quiet=True,
        device="cpu",
        kv_blocks=80,
        max_running_requests=8,
        overlap_depth=depth,
        max_loras_per_batch=2,
        lora_policy="rotate",
        lora_rotation_quantum_ms=1.0,
        lora_max_stall_ms=2.0,
        lora_paths=[f"{name}={folder() / name}" for name in ADAPTERS],
    )


def guided(grammar: Grammar, way: str) -> SamplingParams:
    return SamplingParams(max_new_tokens=MOST_TOKENS, grammar=grammar, ignore_eos=True, **WAYS[way])


@dataclass(frozen=True, slots=True)
class Asked:
    """A schema, how its answer is sampled, and by which adapter."""

    schema: dict[str, Any]
    way: str
    adapter: str | None = None

    @property
    def grammar(self) -> Grammar:
        return texts.json_schema(self.schema, "json")

    @property
    def params(self) -> SamplingParams:
        return guided(self.grammar, self.way)

    def check(self, answer: Completion) -> None:
        """An answer that ended meets the schema; one that was cut is the beginning of one that would."""
        if answer.finish_reason == "stop":
            validator = jsonschema.Draft202012Validator(self.schema, format_checker=FORMATS)
            assert validator.is_valid(json.loads(answer.text)), (self, answer.text)
        else:
            assert answer.finish_reason == "length"
            matcher = byte_grammars().matcher(self.grammar)
            matcher.accept(answer.token_ids)
            assert not matcher.fault, (self, answer.text)


def mixed(schemas: Sequence[dict[str, Any]], ways: Sequence[str] = tuple(WAYS)) -> list[Asked]:
    """Each schema for the base model or an adapter, in turn, sampled in each way in turn."""
    models = (None, *ADAPTERS)
    return [Asked(schema, ways[place % len(ways)], models[place % len(models)]) for place, schema in enumerate(schemas)]


def answers_of(llm: LLM, asked: Sequence[Asked], free: int = 0) -> list[Completion]:
    """The answers of all at the same time, with `free` requests among them that have no grammar."""
    plain = SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True)
    params = [one.params for one in asked] + [plain] * free
    adapters = [one.adapter for one in asked] + [ADAPTERS[0]] * free
    answers = llm.generate(["say it"] * len(params), params, adapters)
    assert [len(answer.token_ids) for answer in answers[len(asked) :]] == [40] * free
    return answers[: len(asked)]
