"""The body of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from rota.core.errors import RequestError
from rota.core.request import MAX_LOGPROBS, SamplingParams
from rota.server.call_options import CallOptions
from rota.server.fields import MAX_COUNT, Count, Unsupported, read_body, unless, within
from rota.server.openai.answer_form import AnswerForm, answer_form, template_variables
from rota.server.openai.message_fields import Messages, conversation
from rota.server.openai.prompt_ending import PromptEnding
from rota.server.openai.sampling_fields import ModelNames, SamplingFields, StreamOptions
from rota.server.openai.structured_fields import StructuredFields
from rota.server.openai.tool_fields import ToolFields
from rota.server.openai.tool_use import tool_use
from rota.server.prompts import Prompts, Reading, Texts
from rota.server.reading import AskedModels
from rota.server.structured import guided
from rota.text.speech import Speech


class ChatFields(ToolFields, StructuredFields, PromptEnding, SamplingFields):
    """A conversation to be continued."""

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: Count | None = within(0, MAX_LOGPROBS)
    # A note for storage or billing. It changes nothing about the answer.
    metadata: dict[str, Any] | None = None
    # Who asks, if `user` does not say it.
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Only values that ask for the default behaviour.
    service_tier: Literal["auto", "default"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
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

    def reading(self) -> Reading:
        """How the prompt is read. Without a limit, room for one token is left."""
        return Reading(self.truncate_prompt_tokens, self.asked_tokens() or 1)

    def alternatives(self) -> int | None:
        """How many alternatives come with every token's log-probability. None: no log-probabilities."""
        if not self.logprobs:
            if self.top_logprobs:
                raise RequestError.bad_field("top_logprobs", "top_logprobs needs logprobs to be true.")
            return None
        return self.top_logprobs or 0


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
    form: AnswerForm

    @property
    def speech(self) -> Speech:
        """How the answer's text is sorted."""
        return self.form.speech

    @property
    def asked_models(self) -> AskedModels:
        return self.names.asked


def read_chat(texts: Texts, raw: bytes) -> ChatCall:
    """Read a body. Raises RequestError for the first field that is wrong."""
    return chat_call(texts, read_body(ChatFields, raw))


def chat_call(texts: Texts, fields: ChatFields) -> ChatCall:
    """What a route needs, also one that is not OpenAI's. Raises RequestError for the first field that is wrong."""
    fields.refuse_unsupported()
    choices, options, logprobs = fields.choices(), fields.usage_wanted(), fields.alternatives()
    sampling = fields.sampling(fields.output_limit(), logprobs, texts.tokenizer)
    texts.check_count(1, choices)
    is_continued = fields.is_continued()
    use = tool_use(fields)
    rendered = texts.rendered(
        conversation(fields.messages),
        fields.has_generation_prompt(),
        is_continued,
        use.shown or None,
        template_variables(texts.tokenizer.chat, fields),
    )
    prompt = texts.as_prompt(rendered, "messages", fields.reading())
    form = answer_form(texts, fields, use, prompt, fields.grammar())
    return ChatCall(
        names=fields.names,
        is_streamed=bool(fields.stream),
        options=options,
        choices=choices,
        has_logprobs=logprobs is not None,
        sampling=guided(sampling, form.grammar, texts.tokenizer.eos_ids),
        prompts=Prompts((prompt,), ("messages",)),
        asks=form.shown_in(fields.call_options()),
        tells_prompt_logprobs=fields.prompt_logprobs is not None,
        is_continued=is_continued,
        limit_param=None if fields.asked_tokens() is None else fields.limit_param,
        form=form,
    )
