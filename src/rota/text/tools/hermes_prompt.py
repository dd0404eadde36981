"""Hermes' form puts tools, calls and results into plain messages, for a chat template that knows none of them.

The built-in adapter `tools` is trained on exactly this form. A changed character here means to train it again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import groupby
from typing import Any

_BEFORE_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_AFTER_TOOLS = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
_CALL = ("<tool_call>\n", "\n</tool_call>")
_RESULT = ("<tool_response>\n", "\n</tool_response>")

# Every text that this form writes by itself.
LITERALS = (_BEFORE_TOOLS, _AFTER_TOOLS, *_CALL, *_RESULT)

Message = Mapping[str, Any]


def in_hermes_form(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, has_system: bool = True
) -> list[Message]:
    """The same conversation with roles system, user and assistant alone. `has_system`: the template takes that role.

    Texts are put together by `+` alone, because users' texts may be in disguise (`user_text`).
    """
    plain: list[Message] = []
    for is_result, group in groupby(messages, lambda message: bool(message["role"] == "tool")):
        together = list(group)
        plain += [_results(together)] if is_result else map(_with_calls, together)
    return _with_tools(plain, _BEFORE_TOOLS + _listed(tools) + _AFTER_TOOLS, has_system) if tools else plain


def _with_tools(messages: list[Message], tools: str, has_system: bool) -> list[Message]:
    """The tools stand behind the system's own words, or before the user's if there can be no system message."""
    first = messages[0]
    if first["role"] == "system":
        return [{**first, "content": first["content"] + "\n\n" + tools}, *messages[1:]]
    if has_system:
        return [{"role": "system", "content": tools}, *messages]
    if first["role"] == "user":
        return [{**first, "content": tools + "\n\n" + first["content"]}, *messages[1:]]
    return [{"role": "user", "content": tools}, *messages]


def _results(messages: list[Message]) -> Message:
    """Results that follow each other share a message."""
    first, *others = [_RESULT[0] + message["content"] + _RESULT[1] for message in messages]
    return {"role": "user", "content": reduce(lambda text, result: text + "\n" + result, others, first)}


def _with_calls(message: Message) -> Message:
    """The calls of a message stand behind its words."""
    if "tool_calls" not in message:
        return message
    content = message["content"]
    for call in message["tool_calls"]:
        content += ("\n" if content else "") + _CALL[0] + _as_json(call["function"]) + _CALL[1]
    return {"role": message["role"], "content": content}


def _listed(tools: Sequence[Mapping[str, Any]]) -> str:
    return "".join("\n" + _as_json(tool) for tool in tools)


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
