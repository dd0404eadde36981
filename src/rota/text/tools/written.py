"""How a call is written in each format, for answers in which a grammar keeps the form of calls."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass


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
