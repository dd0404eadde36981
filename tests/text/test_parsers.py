"""The parsers follow from the template, unless the operator names them."""

from __future__ import annotations

from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from rota.core.config import ServerConfig
from rota.text.reasoning import MARKS
from rota.text.speech import ParserNames
from rota.text.tokenizer import Tokenizer
from rota.text.tools.formats import FORMATS
from tests.text.families import CHATML, FAMILIES, QWEN3, Family

KNOWS = "{{ tools }}{% if messages[0].role == 'tool' %}{% endif %}"


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (CHATML, "hermes", ""),
        (QWEN3, "hermes", "think"),
        (KNOWS + "<tool_call>", "hermes", ""),
        (KNOWS + "{{ '[TOOL_CALLS]' }}[THINK]", "mistral", "mistral"),
        (KNOWS + "<|python_tag|>", "llama3_json", ""),
        (KNOWS + "<|python_start|>", "pythonic", ""),
        (KNOWS + "<|tool_call|>Here is my thought process:", "json", "granite"),
        ("[TOOL_CALLS]", "hermes", ""),  # it knows no tools, so they are rendered in Hermes' form
    ],
)
def test_a_template_tells_how_its_model_calls_and_thinks(tmp_path: Path, template: str, tools: str, reasoning: str):
    chat = Tokenizer(Family(template, FAMILIES["chatml"].special).write(tmp_path)).chat

    assert (ParserNames().tools_of(chat), ParserNames().reasoning_of(chat)) == (tools, reasoning)
    assert (ParserNames("json", "think").tools_of(chat), ParserNames("json", "think").reasoning_of(chat)) == (
        "json",
        "think",
    )
    assert (ParserNames("none", "none").tools_of(chat), ParserNames("none", "none").reasoning_of(chat)) == ("", "")


def test_the_flags_name_every_parser():
    kinds = get_type_hints(ServerConfig)

    assert {*get_args(kinds["tool_call_parser"])} == {*FORMATS, "auto", "none"}
    assert {*get_args(kinds["reasoning_parser"])} == {*MARKS, "auto", "none"}
