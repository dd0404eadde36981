"""The formats in which models write calls, by the name of their parser."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import partial

from rota.text.markers import Markers
from rota.text.tools.json_calls import JsonCalls, MistralCalls, TaggedCalls
from rota.text.tools.parser import Format
from rota.text.tools.python_calls import PythonCalls

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


# ── written ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# How a call is written in each format, for answers in which a grammar keeps the form of calls.


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A call is `begin`, its name, `middle`, its arguments as JSON and `end`. Text turns into a call at `trigger`."""

    begin: str
    middle: str
    end: str
    trigger: str


# The pythonic format has no entry: its arguments are not JSON.
WRITTEN = {
    "hermes": Written(
        begin='<tool_call>\n{"name": "', middle='", "arguments": ', end="}\n</tool_call>", trigger="<tool_call>"
    ),
    "llama3_json": Written(begin='{"name": "', middle='", "parameters": ', end="}", trigger='{"name": "'),
    "mistral": Written(begin='[TOOL_CALLS][{"name": "', middle='", "arguments": ', end="}]", trigger="[TOOL_CALLS]"),
    "json": Written(begin='{"name": "', middle='", "arguments": ', end="}", trigger='{"name": "'),
}
# Newer models of Mistral have a token between a name and its arguments.
_NEWER_MISTRAL = Written(begin="[TOOL_CALLS]", middle="[ARGS]", end="", trigger="[TOOL_CALLS]")


def written_in(form: str, specials: Set[str]) -> Written:
    """How a model with these special tokens writes a call in a format."""
    return _NEWER_MISTRAL if form == "mistral" and "[ARGS]" in specials else WRITTEN[form]
