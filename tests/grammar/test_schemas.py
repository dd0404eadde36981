"""A schema is kept in every part, or refused with the place of the part that cannot be kept."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings

from rota.core.errors import RequestError
from rota.grammar import texts
from tests.grammar.matching import FORMATS, drawn, takes
from tests.grammar.random_schemas import SCHEMAS

NULL = {"type": "null"}
TRUE_OR_FALSE = {"type": "boolean"}


def closed(properties: dict[str, Any], **others: Any) -> dict[str, Any]:
    fields = {"type": "object", "properties": properties, "additionalProperties": False, "required": list(properties)}
    return fields | others


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        ({"not": NULL}, "json: 'not' is not supported; say what is allowed instead."),
        ({"items": {"uniqueItems": True}}, "json, at /items: 'uniqueItems' is not supported"),
        (closed({"a/b": {"if": NULL}}), "json, at /properties/a~1b: 'if' is not supported"),
        ({"anyOf": [NULL, {"contains": NULL}]}, "json, at /anyOf/1: 'contains' is not supported"),
        ({"dependentRequired": {"a": ["b"]}}, "json: 'dependentRequired' is not supported"),
        ({"propertyNames": {"pattern": "^a"}}, "json: 'propertyNames' is not supported; use patternProperties"),
        ({"unevaluatedProperties": {"a": 1}}, "json: 'unevaluatedProperties' is not supported"),
        ({"x-guidance": {"lenient": True}}, "json: 'x-guidance' is not supported; leave it out."),
        ({"type": "string", "format": "iri"}, "json: the format 'iri' is not supported; use pattern."),
        (
            {"$ref": "https://example.com/a.json"},
            "json, at /$ref: 'https://example.com/a.json' leads out of the schema",
        ),
        ({"items": {"$ref": "other.json#/a"}}, "json, at /items/$ref: 'other.json#/a' leads out of the schema"),
        ({"$ref": "#/$defs/a"}, "json, at /$ref: '#/$defs/a' names nothing in the schema."),
        ({"$ref": "#name"}, "json, at /$ref: '#name' is an anchor; write the path"),
        ({"$ref": 5}, "json, at /$ref: a reference must be a text."),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"not": NULL}}}, "json, at /$defs/a: 'not' is not supported"),
        ({"properties": {"a": 5}}, "json, at /properties/a: a schema must be an object, true or false."),
        ({"const": "a" * 5000}, "json: a text is longer than 4,096 characters."),
        ({"minProperties": 2}, "json: 'minProperties' above 1 is not supported with names that are not listed"),
        ({"$ref": "#"}, "json: it requires itself, so no answer would ever end."),
        (closed({"a": {"$ref": "#"}}), "json, at /properties/a: it requires itself"),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/a"}}}},
            "json: it requires itself",
        ),
        (
            closed({"a": {"anyOf": [{"$ref": "#"}, closed({"b": {"$ref": "#"}})]}}),
            "json, at /properties/a/anyOf/0: it requires itself",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused_with_its_place(schema: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError) as refusal:
        texts.json_schema(schema, "json")
    assert refusal.value.fault.message.startswith(sentence)
    assert refusal.value.fault.param == "json"


def test_a_schema_of_many_levels_is_refused_with_its_place() -> None:
    schema: dict[str, Any] = NULL
    for _ in range(120):
        schema = {"type": "array", "items": schema}
    with pytest.raises(RequestError, match="json, at /items/items/items: the schema is nested too deeply"):
        texts.json_schema(schema, "json")


TREE = {"$defs": {"node": closed({"children": {"type": "array", "items": {"$ref": "#/$defs/node"}}})}}
CAT, DOG = (closed({"kind": {"const": name}, name: NULL}) for name in ("cat", "dog"))


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({"$ref": "#/$defs/node", **TREE}, ['{"children":[{"children":[]}]}'], ["{}", '{"children":[1]}']),
        ({"type": "array", "items": NULL, "uniqueItems": False, "not": False}, ["[null,null]"], ["[1]"]),
        ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": NULL}, ['{"a":null}'], ["1"]),
        (
            {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": NULL},
            ['{"a":null}', '{"a":null,"b":null}', "{}"],
            ['{"c":null}', '{"a":1}'],
        ),
        ({"type": "integer", "minimum": -(2**53), "maximum": 2**53}, ["12", "-9007199254740992"], ["9007199254740993"]),
        ({"type": "integer", "format": "int32"}, ["12"], ['"a"']),
        ({"type": "string", "format": "password"}, ['"a"'], ["1"]),
        ({"type": "string", "format": "date"}, ['"2026-11-16"'], ['"2026-13-16"', '"a"']),
        ({"oneOf": [{"$ref": "#/$defs/c"}, DOG], "$defs": {"c": CAT}}, ['{"kind":"dog","dog":null}'], ["{}"]),
        ({"oneOf": [{"const": 1}, {"enum": [2, "1"]}]}, ["1", "2", '"1"'], ["3"]),
        ({"type": "object", "minProperties": 1, "additionalProperties": NULL}, ['{"a":null}'], ["{}"]),
        (closed({"a": NULL, "b": NULL}, minProperties=2), ['{"a":null,"b":null}'], ['{"a":null}']),
        ({"type": ["string", "null"], "nullable": True, "example": {"not": 1}}, ["null", '"a"'], ["1"]),
        ({"$defs": {"unused": {"not": NULL}}, "type": "null"}, ["null"], ["1"]),
        (closed({"a": {"anyOf": [NULL, {"$ref": "#"}]}}), ['{"a":{"a":null}}'], ['{"a":{}}']),
        ({"items": {"type": "null"}, "type": "array", "prefixItems": [TRUE_OR_FALSE]}, ["[true,null]"], ["[null]"]),
    ],
)
def test_a_schema_is_kept_in_every_part(schema: dict[str, Any], taken: list[str], refused: list[str]) -> None:
    before = copy.deepcopy(schema)
    grammar = texts.json_schema(schema, "json")
    assert schema == before, "the client's schema stays as it was"
    assert [text for text in taken if not takes(grammar, text)] == []
    assert [text for text in refused if takes(grammar, text)] == []


def test_one_of_that_may_overlap_is_left_to_the_library() -> None:
    schema = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    assert not takes(texts.json_schema(schema, "json"), "1")


# The examples of llguidance's and xgrammar's documentation: which keywords they show, in schemas of our own.
EXAMPLES: dict[str, dict[str, Any]] = {
    "person": closed({"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0}}),
    "optional": {"type": "object", "properties": {"a": NULL, "b": TRUE_OR_FALSE}, "additionalProperties": False},
    "numbers": closed({"a": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2}, "b": {"type": "integer"}}),
    "multiples": closed({"a": {"type": "integer", "multipleOf": 7}}),
    "patterns": closed({"zip": {"type": "string", "pattern": "^[0-9]{5}(-[0-9]{4})?$"}}),
    "formats": closed({name: {"type": "string", "format": name} for name in ("date", "ipv4", "uuid", "date-time")}),
    "lengths": closed({"a": {"type": "string", "minLength": 2, "maxLength": 4}}),
    "arrays": closed({"a": {"type": "array", "items": TRUE_OR_FALSE, "minItems": 1, "maxItems": 3}}),
    "tuples": closed({"a": {"type": "array", "prefixItems": [NULL, TRUE_OR_FALSE], "items": False, "minItems": 2}}),
    "unions": closed({"a": {"anyOf": [NULL, {"type": "integer", "maximum": 9, "minimum": 0}]}}),
    "tagged unions": {"oneOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/d"}], "$defs": {"c": CAT, "d": DOG}},
    "merged": {"allOf": [closed({"a": NULL}), {"type": "object", "required": ["a"]}]},
    "enums": closed({"a": {"enum": ["x", 1, None, 2.5]}, "b": {"const": {"c": [1, "d"]}}}),
    "recursive": {"$ref": "#/$defs/node", **TREE},
    "named by pattern": {"type": "object", "patternProperties": {"^[ab]$": NULL}, "additionalProperties": False},
    "open": {"type": "object", "properties": {"a": NULL}, "required": ["a"], "additionalProperties": TRUE_OR_FALSE},
    "types": {"type": ["null", "boolean", "integer"]},
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_answers_meet_the_schema(name: str) -> None:
    schema = EXAMPLES[name]
    answers = [drawn(texts.json_schema(schema, "json"), Random(seed), most=2000) for seed in range(30)]
    whole = [answer.text for answer in answers if answer.is_whole]
    assert len(whole) >= 27
    validator = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
    assert [text for text in whole if not validator.is_valid(json.loads(text))] == []


# ── random schemas ────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=40, deadline=None, derandomize=True)
@given(schema=SCHEMAS)
def test_answers_drawn_by_chance_meet_their_schema(schema: dict[str, Any]) -> None:
    grammar = texts.json_schema(schema, "json")
    validator = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
    for seed in range(3):
        answer = drawn(grammar, Random(seed))
        assert not answer.is_whole or validator.is_valid(json.loads(answer.text)), answer.text
