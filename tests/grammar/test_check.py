"""A grammar that no answer can follow is found out before a request with it is taken."""

from __future__ import annotations

from typing import Any

import pytest

from rota.core.grammar import Grammar
from rota.grammar import texts
from rota.grammar.check import problem
from rota.grammar.grammars import Vocabulary
from rota.text.tokenizer import Tokenizer
from tests.grammar.test_schemas import EXAMPLES
from tests.tiny_tokenizer import write_byte_tokenizer


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return Vocabulary(Tokenizer(write_byte_tokenizer(tmp_path_factory.mktemp("model"))), 256)


def json_of(schema: Any) -> Grammar:
    return texts.json_schema(schema, "json")


def within(schema: Any) -> Any:
    """A schema deep in another."""
    return {"type": "object", "properties": {"a": {"type": "array", "items": {"anyOf": [{"type": "null"}, schema]}}}}


def tag(schema: Any) -> texts.Tag:
    return texts.Tag(trigger="<t>", begin="<t>", schema=schema, end="</t>")


@pytest.mark.parametrize(
    ("grammar", "sentence"),
    [
        (json_of({"minimum": 5, "maximum": 3, "type": "integer"}), "Unsatisfiable schema: minimum (5) is greater than"),
        (json_of(within({"type": "banana"})), "at /properties/a/items/anyOf/1: Invalid type: banana."),
        (json_of({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf constraints are not supported"),
        (json_of(within({"type": "string", "pattern": "("})), "at /properties/a/items/anyOf/1: "),
        (json_of({"type": "string", "pattern": "(?=a)b"}), "look-around, including look-ahead and look-behind"),
        (
            json_of({"type": "object", "required": ["a"], "additionalProperties": False}),
            "Unsatisfiable schema: required",
        ),
        (
            texts.after_thinking(json_of(within({"type": "x"})), "</t>"),
            "at /properties/a/items/anyOf/1: Invalid type: x.",
        ),
        (
            texts.tagged([tag(True), tag(within({"type": "x"}))], "tools"),
            "at tag 1 /properties/a/items/anyOf/1: Invalid",
        ),
        (texts.regex("(a", "regex"), 'invalid regex "(a" (in regex): regex parse error: unclosed group.'),
        (texts.regex("a(?<=b)", "regex"), "invalid regex"),
        (texts.regex(r"[^\s\S]", "regex"), "no token of the model can follow at the beginning of an answer."),
        (texts.regex("a\x01", "regex"), ""),
        (
            texts.regex("a{1000000}", "regex"),
            "the grammar is too complex (lexer error: too many expressions constructed) after 1 tokens",
        ),
        (texts.ebnf("start: a\n", "ebnf"), "at 1(8): unknown name: "),
        (texts.ebnf('root ::= "a" root', "ebnf"), "the grammar is too complex (parser error: Too many items"),
    ],
)
def test_what_no_answer_can_follow_is_refused(vocabulary: Vocabulary, grammar: Grammar, sentence: str) -> None:
    assert sentence in problem(vocabulary, grammar)
    assert problem(vocabulary, grammar)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_can_be_followed(vocabulary: Vocabulary, name: str) -> None:
    assert problem(vocabulary, json_of(EXAMPLES[name])) == ""
