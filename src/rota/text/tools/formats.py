"""The formats in which models write calls, by the name of their parser."""

from __future__ import annotations

from functools import partial

from rota.text.markers import Markers
from rota.text.tools.json_calls import JsonCalls
from rota.text.tools.mistral_calls import MistralCalls
from rota.text.tools.parser import Format
from rota.text.tools.python_calls import PythonCalls
from rota.text.tools.tagged_calls import TaggedCalls

FORMATS = {
    # Hermes, Qwen, and templates that know no tools: <tool_call>{"name": "f", "arguments": {}}</tool_call>
    "hermes": Format(markers=Markers("<tool_call>"), reader=partial(TaggedCalls, end="</tool_call>")),
    # The whole answer is {"name": "f", "parameters": {}}; further calls follow a semicolon.
    "llama3_json": Format(markers=Markers("<|python_tag|>"), openings="{", separators=";", reader=JsonCalls),
    # Llama 3.2 and 4. The whole answer is [f(a=1), g(b="x")]
    "pythonic": Format(markers=Markers("<|python_start|>", "<|python_tag|>"), openings="[", reader=PythonCalls),
    # [TOOL_CALLS][{"name": "f", "arguments": {}}] or, in newer models, [TOOL_CALLS]f[ARGS]{}
    "mistral": Format(markers=Markers("[TOOL_CALLS]"), within=("[CALL_ID]", "[ARGS]"), reader=MistralCalls),
    # The whole answer is {"name": "f", "arguments": {}} or a list of these. Granite writes a marker before it.
    "json": Format(markers=Markers("<|tool_call|>"), openings="{[", reader=JsonCalls),
}

# What a chat template writes if its model's calls have a format. The first that is found decides.
_SIGNS = (
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_start|>", "pythonic"),
    ("func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": ', "llama3_json"),
)


def format_in(template: str) -> str:
    """The format that a chat template with tools tells of. If it tells of none, calls are plain JSON."""
    return next((form for sign, form in _SIGNS if sign in template), "json")
