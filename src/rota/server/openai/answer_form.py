"""What an answer may look like, and how its text is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rota.core.errors import RequestError
from rota.core.grammar import Grammar
from rota.grammar.texts import after_thinking
from rota.server.call_options import CallOptions
from rota.server.openai.tool_fields import ToolFields
from rota.server.openai.tool_grammar import form_of_calls, tool_grammar
from rota.server.openai.tool_use import ToolUse
from rota.server.prompts import Texts
from rota.text.chat import ChatTemplate
from rota.text.markers import Markers
from rota.text.reasoning import MARKS, Marks
from rota.text.speech import Speech
from rota.text.tokenizer import Tokenizer
from rota.text.tools.formats import FORMATS

# More tokens than the marks of thoughts have.
_TAIL = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """It is small, and travels between processes."""

    speech: Speech
    # None: everything is allowed.
    grammar: Grammar | None = None
    # Special tokens that the parsers have to see.
    shown: frozenset[int] = frozenset()
    # A call of a function that the client named ends the answer with 'stop', as OpenAI's do.
    is_named: bool = False
    # The answer has one call, in OpenAI's older form.
    is_old_form: bool = False

    def shown_in(self, asks: CallOptions) -> CallOptions:
        """The options of a call whose text shows what the parsers have to see."""
        return replace(asks, text=replace(asks.text, shown=asks.text.shown | self.shown)) if self.shown else asks


def answer_form(
    texts: Texts, fields: ToolFields, use: ToolUse, prompt: Sequence[int], wanted: Grammar | None
) -> AnswerForm:
    """The form of the answer to a prompt; `wanted` is what the client asked of its text.

    Raises RequestError if the server cannot keep the form, or cannot read it.
    """
    tokenizer = texts.tokenizer
    reasoning = texts.parsers.reasoning_of(tokenizer.chat)
    speech = Speech(
        tools=form_of_calls(use, texts.parsers.tools_of(tokenizer.chat), wanted),
        names=use.names,
        reasoning="" if fields.separate_reasoning is False else reasoning,
        is_thinking=bool(reasoning) and _ends_with(tokenizer, prompt, MARKS[reasoning].starts),
        shows_reasoning=fields.include_reasoning is not False,
    )
    specials = tokenizer.special_ids(_markers(speech.tools, reasoning))
    grammar = tool_grammar(use, speech.tools, wanted, specials)
    if grammar and reasoning and not _ends_with(tokenizer, prompt, MARKS[reasoning].ends):
        grammar = _behind_thoughts(grammar, MARKS[reasoning], speech.is_thinking, specials)
    return AnswerForm(
        speech=speech,
        grammar=grammar,
        shown=frozenset(specials.values()),
        is_named=use.is_named,
        is_old_form=use.is_old_form,
    )


def _behind_thoughts(grammar: Grammar, marks: Marks, is_thinking: bool, specials: Mapping[str, int]) -> Grammar:
    start, end = marks.starts.texts[0], marks.ends.texts[0]
    return after_thinking(grammar, end, specials, "" if is_thinking else start)


def template_variables(chat: ChatTemplate, fields: ToolFields) -> dict[str, Any]:
    """What the client tells the chat template. Raises RequestError for what it must not tell, or would tell in vain."""
    variables = dict(fields.chat_template_kwargs or {})
    for name in variables:
        chat.check_variable(name, f"chat_template_kwargs.{name[:100]}")
    effort = fields.reasoning_effort
    if effort is None:
        return variables
    if chat.reads("reasoning_effort"):
        return {"reasoning_effort": effort, **variables}
    if effort == "none":
        return {"enable_thinking": False, **variables}
    message = (
        f"Rota does not support reasoning_effort '{effort}' for this model: its chat template does not read it. Leave "
        "it out, or set what the template reads in chat_template_kwargs."
    )
    raise RequestError.bad_field("reasoning_effort", message)


def _ends_with(tokenizer: Tokenizer, prompt: Sequence[int], marks: Markers) -> bool:
    return "".join(map(tokenizer.pieces.name_of, prompt[-_TAIL:])).rstrip().endswith(marks.texts)


def _markers(tools: str, reasoning: str) -> list[str]:
    """Every text that changes what the text behind it means."""
    found = [*FORMATS[tools].markers.texts, *FORMATS[tools].within] if tools else []
    return found + ([*MARKS[reasoning].starts.texts, *MARKS[reasoning].ends.texts] if reasoning else [])
