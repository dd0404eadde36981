"""Every kind of grammar takes what it says and nothing else, and GBNF becomes Lark that takes the same."""

from __future__ import annotations

import json
import re
from random import Random

import pytest

from rota.core.errors import RequestError
from rota.core.grammar import Grammar
from rota.grammar import texts
from rota.grammar.gbnf import GbnfError, as_lark
from rota.grammar.texts import MAX_PATTERN, Tag
from tests.grammar.matching import END, allowed, begins, byte_grammars, drawn, takes

GBNF = 'root ::= item ("," item)*\nitem ::= [a-c]+ | "(" root ")"'
LARK = 'start: item ("," item)*\nitem: LETTERS | "(" start ")"\nLETTERS: /[a-c]+/'


def schema(properties: dict[str, object]) -> Grammar:
    fields = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return texts.json_schema(fields, "response_format")


@pytest.mark.parametrize(
    ("grammar", "taken", "refused"),
    [
        (texts.regex(r"[a-c]+/\d{2}", "regex"), ["ab/12", "c/00"], ["ab/1", "ab", "", "ab/123", "d/12"]),
        (texts.regex("^(yes|no)$", "regex"), ["yes", "no"], ["", "yess", " yes"]),
        (texts.regex("a\\/b\n[/]", "regex"), ["a/b\n/"], ["a/b"]),
        (texts.regex("", "regex"), [""], ["a"]),
        (texts.choice(["ja", 'ne"in', "ö\n"], "choice"), ["ja", 'ne"in', "ö\n"], ["", "j", "ja ", "nein"]),
        (texts.choice(["", "a"], "choice"), ["", "a"], ["b"]),
        (texts.ebnf(GBNF, "ebnf"), ["a", "abc,b", "(a,(b))"], ["", "d", "(a", "a,"]),
        (texts.ebnf(LARK, "ebnf"), ["a", "abc,b", "(a,(b))"], ["", "d", "(a", "a,"]),
        (texts.json_object("response_format"), ["{}", '{"a": [1, null]}', '{\n  "a": 1\n}'], ["[]", "1", "", '{"a"}']),
        (texts.json_schema(True, "json"), ["{}", "[]", "1", '"a"'], ["", "a"]),
        (schema({"b": {"type": "null"}, "a": {}}), ['{"b":null,"a":1}'], ["{}", '{"a":1,"b":null}', '{"b":null}']),
    ],
)
def test_a_grammar_takes_what_it_says(grammar: Grammar, taken: list[str], refused: list[str]) -> None:
    assert [text for text in taken if not takes(grammar, text)] == []
    assert [text for text in refused if takes(grammar, text)] == []


def test_blanks_between_the_parts_of_json_are_bounded() -> None:
    grammar = schema({"a": {"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 2}})
    texts_drawn = [drawn(grammar, Random(seed)).text for seed in range(40)]
    blanks = {blank for text in texts_drawn for blank in re.findall(r"\s+", text)}
    assert {json.dumps(json.loads(text)) for text in texts_drawn} == {'{"a": [null, null]}'}
    assert any("\n" in blank for blank in blanks)
    assert [blank for blank in blanks if not re.fullmatch(r" |\n[ \t]{0,16}", blank)] == []
    assert not begins(grammar, "{  ")
    assert not begins(grammar, "{\n\n")


TAGS = [
    Tag(trigger="<t>", begin='<t>{"f":', schema={"type": "null"}, end="}</t>"),
    Tag(trigger="<t>", begin='<t>{"g":', schema={"type": "boolean"}, end="}</t>"),
    Tag(trigger="[u]", begin="[u]", schema={"type": "integer"}, end=";"),
]
F, G, U = '<t>{"f":null}</t>', '<t>{"g":true}</t>', "[u]12;"


@pytest.mark.parametrize(
    ("grammar", "taken", "refused"),
    [
        (texts.tagged(TAGS, "tools"), ["", "hi", f"hi {F} and{G}{U} bye"], ["<t>", '<t>{"f":1}</t>', "[u]x;"]),
        (texts.tagged(TAGS, "tools", at_least=1), [F, f"hi {U} bye", F + G], ["", "hi"]),
        (texts.tagged(TAGS, "tools", at_most=1), ["", "hi", F, f"hi {U} bye"], [F + G, f"{F} [u]"]),
        (texts.tagged(TAGS, "tools", at_least=1, at_most=1), [F, f"a{G}b"], ["", "hi", F + U]),
        (texts.tagged(TAGS, "tools", text_between=False), ["", F, F + G, f"{F}\n{U}"], ["hi", f"{F} {G}", f"{F}\n"]),
        (texts.tagged(TAGS, "tools", at_least=1, at_most=1, text_between=False), [F, G, U], ["", F + F, f" {F}"]),
    ],
)
def test_tagged_parts_match_their_tag(grammar: Grammar, taken: list[str], refused: list[str]) -> None:
    assert [text for text in taken if not takes(grammar, text)] == []
    assert [text for text in refused if takes(grammar, text)] == []


def test_a_tag_may_hold_special_tokens() -> None:
    tag = Tag(trigger="<1>", begin="<1>[", schema={"type": "null"}, end="]<0>")
    matcher = byte_grammars().matcher(texts.tagged([tag], "tools", specials={"<0>": 0, "<1>": 1}))
    assert {1, END, ord("a")} <= allowed(matcher)
    assert 0 not in allowed(matcher)
    matcher.accept([ord("a"), 1])
    assert allowed(matcher) == {ord("[")}
    matcher.accept(list(b"[null]"))
    assert allowed(matcher) == {0}


@pytest.mark.parametrize(
    "answer", [texts.choice(["{}"], "choice"), texts.json_object("json"), texts.regex("[{]}", "regex")]
)
def test_after_thinking_the_grammar_begins(answer: Grammar) -> None:
    grammar = texts.after_thinking(answer, "</think>")
    assert takes(grammar, "I {think</think>\n\n{}")
    assert takes(grammar, "</think>{}")
    assert not takes(grammar, "{}")
    assert not begins(grammar, "hm</think> hm")
    assert grammar.param == answer.param


def test_thinking_may_end_with_a_special_token() -> None:
    matcher = byte_grammars().matcher(texts.after_thinking(texts.choice(["a"], "choice"), "<1>", {"<1>": 1}))
    matcher.accept(list(b"hm"))
    assert END not in allowed(matcher)
    matcher.accept([1])
    assert allowed(matcher) == {ord("a"), ord(" "), ord("\n")}


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: texts.choice([], "choice"), "choice is empty; give at least one text to choose from."),
        (lambda: texts.choice(["\ud800"], "choice"), "choice holds half a surrogate pair"),
        (lambda: texts.json_schema(False, "json"), "json: no answer meets the schema false."),
        (lambda: texts.ebnf("root ::= (root", "ebnf"), "ebnf is not GBNF: in rule 'root' a parenthesis is not closed."),
        (
            lambda: texts.ebnf("root ::= a", "ebnf"),
            "ebnf is not GBNF: rule 'root' names 'a', and there is no such rule.",
        ),
        (
            lambda: texts.ebnf(f"root ::= {'(' * 10_000}", "ebnf"),
            "ebnf is not GBNF: in rule 'root' a parenthesis is not closed.",
        ),
        (
            lambda: texts.ebnf("#" * (MAX_PATTERN + 1), "ebnf"),
            "ebnf makes a grammar of 16,385 characters; at most 16,384",
        ),
        (
            lambda: texts.regex("|".join(map(str, range(10**6))), "regex"),
            "regex makes a grammar of 6,888,889 characters",
        ),
        (lambda: texts.choice(["a" * 5000], "choice"), "choice holds a text of more than 4,096 characters."),
        (lambda: texts.choice(["a" * 999] * 999, "choice"), "choice makes a grammar of"),
        (lambda: texts.json_schema({"enum": ["a" * 99] * 2000}, "json"), "json makes a grammar of"),
    ],
)
def test_what_cannot_be_a_grammar_is_refused_by_name(make: object, sentence: str) -> None:
    assert callable(make)
    with pytest.raises(RequestError) as refusal:
        make()
    assert refusal.value.fault.message.startswith(sentence)
    assert refusal.value.fault.param == sentence.partition(" ")[0].rstrip(":")


# ── GBNF ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

# llama.cpp's grammar of JSON, in our own words.
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws  # a comment
object ::=
  "{" ws (
    string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= "-"? ([0-9] | [1-9] [0-9]{0,15}) ("." [0-9]+)? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
# An example of SGLang's documentation, in our own words.
CAPITALS = """
root ::= city
  | city " is the capital of " country
city ::= "London" | "Paris"
country ::= "England" | "France"
"""


@pytest.mark.parametrize(
    ("grammar", "taken", "refused"),
    [
        (JSON, ["{}", '{"a": [1, -2.5, "x\\n"],\n  "b": null}', '{"é": {}}'], ["", "[]", '{"a"}', '{"a": 01x}']),
        (CAPITALS, ["Paris", "Paris is the capital of France"], ["Rome", "Paris is", "Paris is the capital of Rome"]),
        ('root ::= word " x"\nword ::= [a-z ]+', ["ab x", "a b x x"], ["ab", " xy"]),
        ('root::="a"', ["a"], ["", "b"]),
        ('root ::= "a" # the end', ["a"], []),
        ('root ::= "\\u00e9" [à-ü] "\\x41\\U0001F600"', ["éüA😀"], ["éuA😀"]),
        ('root ::= [^\\n]+ "\\n" [\\]\\[^-]', ["hi\n]", "x\n-", "x\n^"], ["\n\n]"]),
        ("root ::= . [\\d_] [^]", ["\n1x", "x_\n"], ["xx1"]),
        ('root ::= "a"{2} "b"{1,} "c"{ 0 , 2 }', ["aab", "aabbcc"], ["ab", "aa", "aabccc"]),
        ('root ::= ( | "a") ("b" | )', ["", "a", "b", "ab"], ["ba"]),
        ('root ::= ""', [""], ["a"]),
        ('root ::= "/" [/] "\\""', ['//"'], []),
        ('root ::= a-b | A-B\na-b ::= "x"\nA-B ::= "y"\nstart ::= "z"', ["x", "y"], ["z"]),
        ('root ::= "(" root ")" | two\ntwo ::= "1" | "2"', ["1", "((2))"], ["(1", "3"]),
    ],
)
def test_gbnf_takes_what_it_says(grammar: str, taken: list[str], refused: list[str]) -> None:
    made = texts.ebnf(grammar, "ebnf")
    assert [text for text in taken if not takes(made, text)] == []
    assert [text for text in refused if takes(made, text)] == []


@pytest.mark.parametrize(
    ("grammar", "sentence"),
    [
        ("top ::= root", "there is no rule 'root', with which an answer begins"),
        ('root ::= "a"\nroot ::= "b"', "there are two rules 'root'"),
        ('"a" root ::= "a"', "'\"a\"' stands before the first rule"),
        ('root ::= "a"\n  /b/', "'/b/', in line 2 at column 3, cannot be read"),
        ('root ::= "a', "'\"a', in line 1 at column 10, cannot be read"),
        ("root ::= a", "rule 'root' names 'a', and there is no such rule"),
        ("root ::= ( * )", "in rule 'root' nothing stands before '*'"),
        ('root ::= "a" | {2}', "in rule 'root' nothing stands before '{2}'"),
        ('root ::= "a")', "in rule 'root' a parenthesis is closed that is not open"),
        ('root ::= ("a"', "in rule 'root' a parenthesis is not closed"),
        ("root ::= []", "in rule 'root' [] is an empty set"),
        ("root ::= [z-a]", "in rule 'root' [z-a] has a range that ends before it begins, z-a"),
        ('root ::= "\\q"', "in rule 'root' \"\\q\" has \\q, which has no meaning"),
        ('root ::= "\\uD800"', "in rule 'root' \"\\uD800\" has \\uD800, which is no character"),
    ],
)
def test_what_is_not_gbnf_is_refused_with_its_place(grammar: str, sentence: str) -> None:
    with pytest.raises(GbnfError) as refusal:
        as_lark(grammar)
    assert str(refusal.value) == sentence


def test_nested_groups_are_read_too() -> None:
    assert takes(texts.ebnf(f'root ::= {"(" * 10}"a"{")" * 10}', "ebnf"), "a")
