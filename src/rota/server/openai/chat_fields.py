"""The body of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from rota.core.errors import RequestError
from rota.core.request import MAX_LOGPROBS, SamplingParams
from rota.server.call_options import CallOptions
from rota.server.fields import MAX_COUNT, Count, Fields, Unsupported, read_body, unless, within
from rota.server.openai.sampling_fields import ModelNames, SamplingFields, StreamOptions
from rota.server.openai.structured_fields import StructuredFields
from rota.server.openai.tool_fields import ToolFields
from rota.server.prompts import Prompts, Reading, Texts
from rota.server.structured import guided
from rota.text.speech import Speech


class ContentPart(Fields):
    """A part of a message. Only parts of type 'text' are supported."""

    # A part of another type has other fields. It is refused for its type, not for its fields.
    model_config = ConfigDict(extra="allow", strict=True, json_schema_extra={"required": ["type", "text"]})

    type: str = Field(json_schema_extra={"const": "text"})
    text: str | None = Field(default=None, json_schema_extra={"type": "string"})


class Message(Fields):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)]
    name: str | None = None
    tool_call_id: str | None = None
    type: Literal["text"] | None = None
    tool_calls: Unsupported = None
    function_call: Unsupported = None
    refusal: Unsupported = None
    annotations: Unsupported = None
    audio: Unsupported = None

    def for_template(self, where: str) -> dict[str, Any]:
        """The message as chat templates expect it. `where` names the message in an error."""
        self.refuse_unsupported(f"{where}.")
        # 'developer' is the newer name of the same role, and templates do not know it.
        message = {"role": "system" if self.role == "developer" else self.role, "content": self._text(where)}
        return message | {
            name: value for name in ("name", "tool_call_id") if (value := getattr(self, name)) is not None
        }

    def _text(self, where: str) -> str:
        if isinstance(self.content, str):
            return self.content
        for index, part in enumerate(self.content):
            if part.type != "text":
                message = f"{where}.content.{index} is of type '{part.type[:100]}'; only 'text' is supported."
                raise RequestError.bad_field(f"{where}.content.{index}.type", message)
            if part.text is None:
                raise RequestError.bad_field(
                    f"{where}.content.{index}.text", f"{where}.content.{index}.text is missing."
                )
        return "\n".join(part.text or "" for part in self.content)


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1)]


class ChatFields(ToolFields, StructuredFields, SamplingFields):
    """A conversation to be continued."""

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: Count | None = within(0, MAX_LOGPROBS)
    # Notes for storage or billing. They change nothing about the answer.
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Only values that ask for the default behaviour.
    service_tier: Literal["auto", "default"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
    # False: the template does not begin an answer, and the model goes on from the last message.
    add_generation_prompt: bool | None = None
    # The answer goes on with the last message, which is then not closed.
    continue_final_message: bool | None = None
    prompt_cache_retention: str | None = None
    add_special_tokens: Unsupported = None
    echo: Unsupported = None
    documents: Unsupported = None
    chat_template: Unsupported = None
    web_search_options: Unsupported = None
    store: Unsupported = None
    audio: Unsupported = None
    prediction: Unsupported = None
    verbosity: Unsupported = unless("medium")

    def refuse_unsupported(self, where: str = "") -> None:
        super().refuse_unsupported(where)
        self.refuse_unsupported_tools()

    @property
    def client_names(self) -> Mapping[str, str]:
        return {**super().client_names, "logprobs": "top_logprobs"}

    def output_limit(self) -> int:
        """The most output tokens. Left out: as many as the context holds."""
        asked = self.asked_tokens()
        # The engine stops at the end of the context in any case.
        return MAX_COUNT if asked is None else asked

    def reading(self) -> Reading:
        """How the prompt is read. Without a limit, room for one token is left."""
        return Reading(self.truncate_prompt_tokens, self.asked_tokens() or 1)

    def is_continued(self) -> bool:
        """Whether the answer goes on with the last message."""
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message goes on with the last message, so add_generation_prompt must be false."
            raise RequestError.bad_field("continue_final_message", message)
        return bool(self.continue_final_message)

    def alternatives(self) -> int | None:
        """How many alternatives come with every token's log-probability. None: no log-probabilities."""
        if not self.logprobs:
            if self.top_logprobs:
                raise RequestError.bad_field("top_logprobs", "top_logprobs needs logprobs to be true.")
            return None
        return self.top_logprobs or 0


def conversation(messages: list[Message]) -> list[dict[str, Any]]:
    """The messages as chat templates expect them."""
    return [message.for_template(f"messages.{index}") for index, message in enumerate(messages)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """What the route needs of a body. It is small, however long the conversation is."""

    names: ModelNames
    is_streamed: bool
    options: StreamOptions
    choices: int
    has_logprobs: bool
    sampling: SamplingParams
    prompts: Prompts
    asks: CallOptions
    tells_prompt_logprobs: bool
    is_continued: bool  # the answer goes on with the last message
    limit_param: str | None  # the client's field that limits the output; None: the client set no limit
    speech: Speech  # how the answer's text is sorted


def read_chat(texts: Texts, raw: bytes) -> ChatCall:
    """Read a body. Raises RequestError for the first field that is wrong."""
    return chat_call(texts, read_body(ChatFields, raw))


def chat_call(texts: Texts, fields: ChatFields) -> ChatCall:
    """What a route needs, also one that is not OpenAI's. Raises RequestError for the first field that is wrong."""
    fields.refuse_unsupported()
    choices, options, logprobs = fields.choices(), fields.usage_wanted(), fields.alternatives()
    sampling = fields.sampling(fields.output_limit(), logprobs, texts.tokenizer)
    sampling = guided(sampling, fields.grammar(), texts.tokenizer.eos_ids)
    texts.check_count(1, choices)
    is_continued = fields.is_continued()
    has_generation_prompt = fields.add_generation_prompt is not False and not is_continued
    rendered = texts.rendered(conversation(fields.messages), has_generation_prompt, is_continued)
    prompts = Prompts((texts.as_prompt(rendered, "messages", fields.reading()),), ("messages",))
    return ChatCall(
        names=fields.names,
        is_streamed=bool(fields.stream),
        options=options,
        choices=choices,
        has_logprobs=logprobs is not None,
        sampling=sampling,
        prompts=prompts,
        asks=fields.call_options(),
        tells_prompt_logprobs=fields.prompt_logprobs is not None,
        is_continued=is_continued,
        limit_param=None if fields.asked_tokens() is None else fields.limit_param,
        speech=Speech(),
    )
