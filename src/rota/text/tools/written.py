"""How a call is written in each format, for answers in which a grammar keeps the form of calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A call is `begin`, its name, `middle`, its arguments as JSON and `end`. Text turns into a call at `trigger`."""

    begin: str
    middle: str
    end: str
    trigger: str


_JSON = Written(begin='{"name": "', middle='", "arguments": ', end="}", trigger='{"name": "')

# The pythonic format has no entry: its arguments are no JSON.
WRITTEN = {
    "hermes": Written(
        begin='<tool_call>\n{"name": "', middle='", "arguments": ', end="}\n</tool_call>", trigger="<tool_call>"
    ),
    "llama3_json": Written(begin='{"name": "', middle='", "parameters": ', end="}", trigger='{"name": "'),
    "mistral": Written(begin='[TOOL_CALLS][{"name": "', middle='", "arguments": ', end="}]", trigger="[TOOL_CALLS]"),
    "json": _JSON,
}
