"""GBNF becomes Lark that takes the same texts."""

from __future__ import annotations

import pytest

from rota.grammar import texts
from rota.grammar.gbnf import GbnfError, as_lark
from tests.grammar.matching import takes

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
