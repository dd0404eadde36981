"""The fields that let a model call tools, and think."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rota.core.errors import RequestError
from rota.server.fields import Fields

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class Function(Fields):
    """A function that a model may call. `parameters` is the schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    """A tool. Only functions are supported."""

    type: str = Field(json_schema_extra={"const": "function"})
    function: Function


Tools = Annotated[list[Tool], Field(fail_fast=True)]


class FunctionName(Fields):
    name: str


class NamedTool(Fields):
    type: str = Field(json_schema_extra={"const": "function"})
    function: FunctionName


class AllowedTools(Fields):
    """Some of the tools, so that a list of tools that stays the same can be used in part."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True, min_length=1)]


class ToolChoice(Fields):
    """One function that must be called, or several that may be."""

    type: Literal["function", "allowed_tools"]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class ToolFields(Fields):
    """OpenAI's tools, and what other servers' clients send about thinking."""

    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    # The older names of tools and tool_choice.
    functions: Annotated[list[Function], Field(fail_fast=True)] | None = None
    function_call: Literal["none", "auto"] | FunctionName | None = None
    # How long the model thinks, if its chat template asks for that.
    reasoning_effort: Effort | None = None
    # Variables of the chat template, for example enable_thinking.
    chat_template_kwargs: dict[str, Any] | None = None
    # vLLM's field: false leaves the thoughts out of the answer.
    include_reasoning: bool | None = None
    # SGLang's field: false leaves the thoughts in the content, as the model wrote them.
    separate_reasoning: bool | None = None

    def has_old_names(self) -> bool:
        """Whether the answer has one call, in OpenAI's older form."""
        if not self.functions:
            return False
        if self.tools:
            raise RequestError.bad_field("functions", "functions is the older name of tools; send one of them.")
        return True
