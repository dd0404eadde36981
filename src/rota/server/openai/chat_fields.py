"""The body of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic_core import from_json

from rota.core.errors import RequestError
from rota.core.grammar import Grammar
from rota.core.request import MAX_LOGPROBS
from rota.grammar.texts import after_thinking
from rota.server.calls.fields import MAX_COUNT, Count, Fields, Unsupported, read_body, within
from rota.server.calls.prompts import CallPrompts, PromptReading, Texts
from rota.server.calls.sampling import guided
from rota.server.openai.sampling_fields import OpenAiCall, SamplingFields
from rota.server.openai.structured_fields import StructuredFields
from rota.server.openai.tools import ToolFields, ToolUse, check_name, form_of_calls, tool_grammar, tool_use
from rota.text.markers import Markers
from rota.text.reasoning import MARKS, ThinkingMarks
from rota.text.speech import Speech
from rota.text.tokenizer import Tokenizer
from rota.text.tools.formats import FORMATS

# ── prompt ending ───────────────────────────────────────────────────────────────────────────────────────────────────
# The fields that say where a conversation's prompt ends: at a new answer, or inside the last message.


class PromptEnding(Fields):
    """vLLM's fields, which its clients send with a conversation."""

    # False: the template does not begin an answer, and the model goes on from the last message.
    add_generation_prompt: bool | None = None
    # The answer goes on with the last message, which is then not closed.
    continue_final_message: bool | None = None

    def is_continued(self) -> bool:
        """Whether the answer goes on with the last message. Raises RequestError if it is to begin anew as well."""
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message goes on with the last message, so add_generation_prompt must be false."
            raise RequestError.bad_field("continue_final_message", message)
        return bool(self.continue_final_message)

    def has_generation_prompt(self) -> bool:
        """Whether the template begins an answer."""
        return self.add_generation_prompt is not False and not self.continue_final_message


# ── message fields ──────────────────────────────────────────────────────────────────────────────────────────────────
# The messages of a conversation, as clients send them and as chat templates expect them.


class ContentPart(Fields):
    """A part of a message. Only parts of type 'text' are supported."""

    # A part of another type has other fields. It is refused for its type, not for its fields.
    model_config = ConfigDict(extra="allow", strict=True, json_schema_extra={"required": ["type", "text"]})

    type: str = Field(json_schema_extra={"const": "text"})
    text: str | None = Field(default=None, json_schema_extra={"type": "string"})


class CalledFunction(Fields):
    """A function and its arguments, which are a JSON object, usually as a text."""

    name: str
    arguments: str | dict[str, Any] = ""
    # The `openai` package adds what it read of a text, and sends it back. The text says the same.
    parsed_arguments: Any = None

    def for_template(self, where: str) -> dict[str, Any]:
        check_name(self.name, f"{where}.name")
        return {"name": self.name, "arguments": self._arguments(f"{where}.arguments")}

    def _arguments(self, where: str) -> dict[str, Any]:
        if not isinstance(self.arguments, str):
            return self.arguments
        try:
            arguments = from_json(self.arguments or "{}", allow_inf_nan=False)
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            raise RequestError.bad_field(where, f"{where} must be the text of a JSON object.")
        return arguments


class MessageCall(Fields):
    """A call that the model made before."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # streams number their calls, and some clients send the numbers back

    def for_template(self, where: str) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": self.function.for_template(f"{where}.function")}


class Message(Fields):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[MessageCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    # The older form of a call. Its result has the role 'function'.
    function_call: CalledFunction | None = None
    # What the model thought before. Templates that know it decide whether it is read again.
    reasoning_content: str | None = None
    reasoning: str | None = None
    type: Literal["text"] | None = None
    parsed: Any = None  # as parsed_arguments
    refusal: Unsupported = None
    audio: Unsupported = None

    def for_template(self, where: str) -> dict[str, Any]:
        """The message as chat templates expect it. `where` names the message in an error."""
        self.refuse_unsupported(f"{where}.")
        calls = self._calls(where)
        message: dict[str, Any] = {"role": _ROLES.get(self.role, self.role), "content": self._text(where, bool(calls))}
        said = self.reasoning_content if self.reasoning is None else self.reasoning
        others = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": said}
        if self.role == "function":
            others["tool_call_id"] = self.name
        if calls:
            message["tool_calls"] = calls
        return message | {name: value for name, value in others.items() if value is not None}

    def _calls(self, where: str) -> list[dict[str, Any]]:
        calls = [one.for_template(f"{where}.tool_calls.{index}") for index, one in enumerate(self.tool_calls or ())]
        if self.function_call:
            called = self.function_call.for_template(f"{where}.function_call")
            calls.append({"id": called["name"], "type": "function", "function": called})
        if calls and self.role != "assistant":
            param = f"{where}.tool_calls" if self.tool_calls else f"{where}.function_call"
            raise RequestError.bad_field(param, f"{param} belongs to messages of the assistant.")
        return calls

    def _text(self, where: str, has_calls: bool) -> str:
        if self.content is None:
            if not has_calls:
                message = f"{where}.content is missing; only a message with tool_calls may have none."
                raise RequestError.bad_field(f"{where}.content", message)
            return ""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(_part_text(part, f"{where}.content.{index}") for index, part in enumerate(self.content))


# 'developer' is the newer name of a role, 'function' the older one of another; templates do not know them.
_ROLES = {"developer": "system", "function": "tool"}

Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1)]


def conversation(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as chat templates expect them. Raises RequestError for a result without its call."""
    called: dict[str, str] = {}
    turns = []
    for index, message in enumerate(messages):
        turn = message.for_template(f"messages.{index}")
        called |= {call["id"]: call["function"]["name"] for call in turn.get("tool_calls", ())}
        if turn["role"] == "tool":
            # Some templates read the name, and clients need not send it.
            turn.setdefault("name", called[_answered(message, turn, called, f"messages.{index}")])
        turns.append(turn)
    return turns


def _answered(message: Message, turn: dict[str, Any], called: dict[str, str], where: str) -> str:
    """The id of the call that a result answers."""
    param = f"{where}.{'name' if message.role == 'function' else 'tool_call_id'}"
    call_id = turn.get("tool_call_id")
    if call_id is None:
        raise RequestError.bad_field(param, f"{param} is missing: it says which call the result is of.")
    if call_id not in called:
        given = call_id[:100]
        raise RequestError.bad_field(param, f"{param} is '{given}', but no message before it makes that call.")
    return str(call_id)


def _part_text(part: ContentPart, where: str) -> str:
    if part.type != "text":
        message = f"{where} is of type '{part.type[:100]}'; only 'text' is supported."
        raise RequestError.bad_field(f"{where}.type", message)
    if part.text is None:
        raise RequestError.bad_field(f"{where}.text", f"{where}.text is missing.")
    return part.text


# ── answer form ─────────────────────────────────────────────────────────────────────────────────────────────────────
# What an answer may look like, and how its text is read.

# More tokens than the marks of thoughts have.
_TAIL = 16


def answer_form(
    texts: Texts, fields: ToolFields, use: ToolUse, prompt: Sequence[int], wanted: Grammar | None
) -> tuple[Speech, Grammar | None, frozenset[int]]:
    """How the answer to a prompt is read, its grammar, and the special tokens that the parsers have to see.

    `wanted` is what the client asked of its text. Raises RequestError if the server cannot keep the form, or cannot
    read it.
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
    return speech, grammar, frozenset(specials.values())


def _behind_thoughts(grammar: Grammar, marks: ThinkingMarks, is_thinking: bool, specials: Mapping[str, int]) -> Grammar:
    start, end = marks.starts.texts[0], marks.ends.texts[0]
    return after_thinking(grammar, end, specials, "" if is_thinking else start)


def template_variables(texts: Texts, fields: ToolFields) -> dict[str, Any]:
    """What the client tells the chat template. Raises RequestError for what it must not tell.

    What the template does not read is ignored, or refused by a server that ignores nothing.
    """
    chat, given = texts.tokenizer.chat, dict(fields.chat_template_kwargs or {})
    for name in given:
        chat.check_variable(name, f"chat_template_kwargs.{name[:100]}")
        if not chat.reads(name):
            texts.unknown.note(f"chat_template_kwargs.{name}")
    told: dict[str, Any] = {}
    for param, variables in fields.thinking_wanted().items():
        read = {name: value for name, value in variables.items() if chat.reads(name)}
        if not read and texts.unknown.mode == "refuse":
            message = (
                f"Rota does not support {param} for this model: its chat template does not read it. Leave it out, or "
                "set what the template reads in chat_template_kwargs."
            )
            raise RequestError.bad_field(param, message)
        if not read:
            texts.unknown.note(param)
        told |= read
    return told | given


def _ends_with(tokenizer: Tokenizer, prompt: Sequence[int], marks: Markers) -> bool:
    return "".join(map(tokenizer.pieces.name_of, prompt[-_TAIL:])).rstrip().endswith(marks.texts)


def _markers(tools: str, reasoning: str) -> list[str]:
    """Every text that changes what the text behind it means."""
    found = [*FORMATS[tools].markers.texts, *FORMATS[tools].within] if tools else []
    return found + ([*MARKS[reasoning].starts.texts, *MARKS[reasoning].ends.texts] if reasoning else [])


class ChatFields(ToolFields, StructuredFields, PromptEnding, SamplingFields):
    """A conversation to be continued."""

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: Count | None = within(0, MAX_LOGPROBS)
    # Who asks, if `user` does not say it.
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
    add_special_tokens: Unsupported = None
    echo: Unsupported = None
    documents: Unsupported = None
    chat_template: Unsupported = None
    web_search_options: Unsupported = None
    audio: Unsupported = None

    @property
    def client_names(self) -> Mapping[str, str]:
        return {**super().client_names, "logprobs": "top_logprobs"}

    def asker(self) -> str | None:
        return self.user or self.safety_identifier or self.prompt_cache_key or super().asker()

    def output_limit(self) -> int:
        """The most output tokens. Left out: as many as the context holds."""
        asked = self.asked_tokens()
        # The engine stops at the end of the context in any case.
        return MAX_COUNT if asked is None else asked

    def reading(self) -> PromptReading:
        """How the prompt is read. Without a limit, room for one token is left."""
        return PromptReading(self.truncate_prompt_tokens, self.asked_tokens() or 1)

    def alternatives(self) -> int | None:
        """How many alternatives come with every token's log-probability. None: no log-probabilities."""
        if not self.logprobs:
            if self.top_logprobs:
                raise RequestError.bad_field("top_logprobs", "top_logprobs needs logprobs to be true.")
            return None
        return self.top_logprobs or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall(OpenAiCall):
    """A conversation to be continued, in whichever shape it came."""

    # A call of a function that the client named ends the answer with 'stop', as OpenAI's do.
    is_named: bool
    # The answer has one call, in OpenAI's older form.
    is_old_form: bool
    # Fields of /v1/responses that its answers repeat.
    echoed: Mapping[str, Any] = field(default_factory=dict)


def read_chat(texts: Texts, raw: bytes) -> ChatCall:
    """Read a body. Raises RequestError for the first field that is wrong."""
    return chat_call(texts, read_body(ChatFields, raw, texts.unknown))


def chat_call(texts: Texts, fields: ChatFields) -> ChatCall:
    """What a route needs, also one that is not OpenAI's. Raises RequestError for the first field that is wrong."""
    fields.refuse_unsupported()
    shared, logprobs = fields.shared(), fields.alternatives()
    sampling = fields.sampling(fields.output_limit(), logprobs, texts.tokenizer)
    texts.check_count(1, fields.choices())
    is_continued = fields.is_continued()
    use = tool_use(fields)
    rendered = texts.rendered(
        conversation(fields.messages),
        fields.has_generation_prompt(),
        is_continued,
        use.shown or None,
        template_variables(texts, fields),
    )
    prompt = texts.as_prompt(rendered, "messages", fields.reading())
    speech, grammar, shown = answer_form(texts, fields, use, prompt, fields.grammar())
    shared["text"] = replace(fields.text_options(), shown=shown)
    return ChatCall(
        **shared,
        prompts=CallPrompts((prompt,), ("messages",)),
        samplings=(guided(sampling, grammar, texts.tokenizer.eos_ids),),
        is_continuation=is_continued,
        speech=speech,
        limit_param=None if fields.asked_tokens() is None else fields.limit_param,
        has_logprobs=logprobs is not None,
        is_named=use.is_named,
        is_old_form=use.is_old_form,
        ignored=texts.unknown.ignored,
    )
