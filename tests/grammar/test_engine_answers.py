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
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rota import LLM, SamplingParams
from rota.core.errors import RequestError
from rota.core.grammar import Grammar
from rota.grammar import texts
from rota.llm.llm import Completion
from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.model_factory import make_tiny_model
from tests.grammar.matching import FORMATS, byte_grammars, takes
from tests.grammar.random_schemas import SCHEMAS
from tests.grammar.test_schemas import EXAMPLES
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


DEPTHS = pytest.mark.parametrize("depth", [1, 2])
# Each way of sampling once, and greedy ones at both depths: sampling does not know how far ahead steps are planned.
EACH_WAY = pytest.mark.parametrize(("depth", "way"), [(1, "greedy"), *((2, way) for way in WAYS)])
BATCH = 20
NAMES = ("person", "enums", "unions")


def check_all(depth: Depth, asked: list[Asked], free: int = 0) -> float:
    """Checks each answer; gives the share of those that ended."""
    answers = answers_of(tiny_llm(depth), asked, free)
    for one, answer in zip(asked, answers, strict=True):
        one.check(answer)
    return sum(answer.finish_reason == "stop" for answer in answers) / len(answers)


@DEPTHS
def test_the_examples_are_followed_in_a_mixed_batch_under_rotation(depth: Depth) -> None:
    assert check_all(depth, mixed(list(EXAMPLES.values())), free=3) > 0.5


@settings(max_examples=2, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(schemas=st.lists(SCHEMAS, min_size=BATCH, max_size=BATCH))
def test_random_schemas_are_followed_in_a_mixed_batch(schemas: list[dict[str, Any]]) -> None:
    assert check_all(2, mixed(schemas), free=2) >= 0.9


@EACH_WAY
def test_an_answer_in_a_batch_is_the_answer_alone(depth: Depth, way: str) -> None:
    asked = [Asked(EXAMPLES[name], way, adapter) for name, adapter in zip(NAMES, ADAPTERS, strict=True)]
    together = answers_of(tiny_llm(depth), asked, free=2)
    alone = [answers_of(tiny_llm(depth), [one])[0] for one in asked]
    assert [answer.text for answer in together] == [answer.text for answer in alone]


@EACH_WAY
def test_other_grammars_are_followed_too(depth: Depth, way: str) -> None:
    grammars = [
        texts.regex("[a-c]{3}-[0-9]{2}", "regex"),
        texts.choice(["yes", "no", "never"], "choice"),
        texts.ebnf('root ::= "<" item "," item ">"\nitem ::= [a-c] | "(" "a" ")"', "ebnf"),
    ]
    answers = tiny_llm(depth).generate(["x"] * 3, [guided(grammar, way) for grammar in grammars])
    assert [answer.finish_reason for answer in answers] == ["stop"] * 3
    assert all(takes(grammar, answer.text) for grammar, answer in zip(grammars, answers, strict=True))


@DEPTHS
def test_an_answer_that_gets_stuck_ends_with_a_sentence(depth: Depth) -> None:
    cannot_be_spelled = texts.regex("[ab]\x01", "regex")
    with pytest.raises(RequestError, match="doesn't satisfy the grammar"):
        tiny_llm(depth).generate("x", guided(cannot_be_spelled, "greedy"))
    assert check_all(depth, [Asked({"type": "null"}, "greedy")]) == 1.0


@pytest.mark.long(
    "200 random schemas, each alone and in a batch, greedy and sampled, at both depths: about ten minutes"
)
@DEPTHS
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=11, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(schemas=st.lists(SCHEMAS, min_size=BATCH, max_size=BATCH))
def test_two_hundred_random_schemas_are_followed(depth: Depth, way: str, schemas: list[dict[str, Any]]) -> None:
    asked = mixed(schemas, [way])
    assert check_all(depth, asked, free=2) >= 0.9
    for one in asked:
        check_all(depth, [one])
