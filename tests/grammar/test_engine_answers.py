"""Whatever a model computes, its answers follow their grammars: alone, mixed, under rotation, at any depth."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rota.core.errors import RequestError
from rota.grammar import texts
from tests.grammar.engine_answers import ADAPTERS, WAYS, Asked, Depth, answers_of, guided, mixed, tiny_llm
from tests.grammar.matching import takes
from tests.grammar.random_schemas import SCHEMAS
from tests.grammar.test_schemas import EXAMPLES

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
