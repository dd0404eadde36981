"""Answers drawn from the masks of random schemas meet their schema."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import jsonschema
from hypothesis import given, settings

from rota.grammar import texts
from tests.grammar.formats import FORMATS
from tests.grammar.matching import drawn
from tests.grammar.random_schemas import SCHEMAS


@settings(max_examples=40, deadline=None, derandomize=True)
@given(schema=SCHEMAS)
def test_answers_drawn_by_chance_meet_their_schema(schema: dict[str, Any]) -> None:
    grammar = texts.json_schema(schema, "json")
    validator = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
    for seed in range(3):
        answer = drawn(grammar, Random(seed))
        assert not answer.is_whole or validator.is_valid(json.loads(answer.text)), answer.text
