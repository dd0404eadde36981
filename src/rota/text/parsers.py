"""Which parsers read a model's answers: those that the operator names, or those that the chat template tells of."""

from __future__ import annotations

from dataclasses import dataclass

from rota.text.chat import ChatTemplate
from rota.text.reasoning import marks_in
from rota.text.tools.formats import format_in


@dataclass(frozen=True, slots=True)
class Parsers:
    """What the operator asked for: a name, 'auto' or 'none'."""

    tool_call: str = "auto"
    reasoning: str = "auto"

    def tools_of(self, chat: ChatTemplate) -> str:
        """The name of the format of calls; empty if calls are not read."""
        if self.tool_call == "auto":
            return format_in(chat.text) if chat.knows_tools else "hermes"
        return "" if self.tool_call == "none" else self.tool_call

    def reasoning_of(self, chat: ChatTemplate) -> str:
        """The name of the marks of thoughts; empty if thoughts are not read."""
        if self.reasoning == "auto":
            return marks_in(chat.text)
        return "" if self.reasoning == "none" else self.reasoning


AS_THE_TEMPLATE_SAYS = Parsers()
