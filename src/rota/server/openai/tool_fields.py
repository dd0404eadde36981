"""The fields that let a model call tools, and think."""

from __future__ import annotations

from typing import Literal

from rota.server.fields import Fields, Unsupported, refuse_unsupported_values


class ToolFields(Fields):
    """OpenAI's tools, and what other servers' clients send about thinking."""

    tool_choice: Literal["none", "auto"] | None = None
    function_call: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    tools: Unsupported = None
    functions: Unsupported = None
    reasoning_effort: Unsupported = None

    def refuse_unsupported_tools(self) -> None:
        """Raises RequestError for values without support that would change the answer."""
        refuse_unsupported_values(self, dict.fromkeys(("tools", "functions", "reasoning_effort"), ()))
