"""Speech says how the text of an answer is sorted into content, reasoning and tool calls, and which parsers do it."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from rota.text.chat import ChatTemplate
from rota.text.parsed_delta import ParsedDelta
from rota.text.reasoning import MARKS, ThinkingParser, marks_in
from rota.text.tools.formats import FORMATS, format_in
from rota.text.tools.parser import ToolParser

# ── speech ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Speech:
    """Which parsers read an answer. By default none: all text is content. Small: it travels between processes."""

    # The name of a format, and the tools that may be called. Empty: nothing is a call.
    tools: str = ""
    names: frozenset[str] = frozenset()
    # The name of a reasoning parser. Empty: nothing is a thought.
    reasoning: str = ""
    is_thinking: bool = False  # from the first token on, because the prompt says so
    shows_reasoning: bool = True

    def parser(self, new_id: Callable[[], str] | None = None) -> OutputParser:
        """For one answer, from its beginning. `new_id` names a call; left out, it is named as the format takes it."""
        return OutputParser(
            ThinkingParser(MARKS[self.reasoning], self.is_thinking) if self.reasoning else None,
            ToolParser(FORMATS[self.tools], self.names, new_id or self._new_id) if self.tools else None,
            self.shows_reasoning,
        )

    def _new_id(self) -> str:
        # Mistral's templates take ids of nine characters, and no others.
        return secrets.token_hex(5)[:9] if self.tools == "mistral" else f"call_{secrets.token_hex(12)}"


ALL_IS_CONTENT = Speech()


class OutputParser:
    """Sorts the text of one answer as it comes. Text that may still become something else is held back."""

    def __init__(self, thinking: ThinkingParser | None, tools: ToolParser | None, shows_reasoning: bool) -> None:
        self._thinking = thinking
        self._tools = tools
        self._shows_reasoning = shows_reasoning

    def push(self, text: str) -> ParsedDelta:
        if self._thinking is None:
            return self._content(text)
        reasoning, text = self._thinking.push(text)
        if self._thinking.is_over:
            self._thinking = None
        return self._with(reasoning, self._content(text))

    def finish(self) -> ParsedDelta:
        """What was held back. No more text comes."""
        reasoning, text = self._thinking.finish() if self._thinking else ("", "")
        said = self._with(reasoning, self._content(text))
        return said + self._tools.finish() if self._tools else said

    def _content(self, text: str) -> ParsedDelta:
        return self._tools.push(text) if self._tools else ParsedDelta(text)

    def _with(self, reasoning: str, said: ParsedDelta) -> ParsedDelta:
        return ParsedDelta(said.content, reasoning, said.calls) if reasoning and self._shows_reasoning else said


# ── parsers ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# Which parsers read a model's answers: those that the operator names, or those that the chat template tells of.


@dataclass(frozen=True, slots=True)
class ParserNames:
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


AS_THE_TEMPLATE_SAYS = ParserNames()
