"""POST /v1/completions continues prompts, in OpenAI's shape."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request as HttpRequest
from fastapi import Response

from rota.core.errors import RequestError
from rota.core.request import MAX_LOGPROBS, SamplingParams
from rota.server.answers.answer import Answer
from rota.server.answers.respond import respond
from rota.server.calls.fields import Count, Unsupported, read_body, within
from rota.server.calls.known_fields import advice_on
from rota.server.calls.prompts import Prompt, PromptReading, Texts
from rota.server.calls.sampling import guided
from rota.server.context import AppContext
from rota.server.openai.sampling_fields import OpenAiCall, SamplingFields
from rota.server.openai.structured_fields import StructuredFields
from rota.server.openai.writer import CompletionLogprobs, OpenAiWriter, prompt_logprobs
from rota.server.streams import Delta
from rota.text.tokenizer import Tokenizer

# ── completion fields ───────────────────────────────────────────────────────────────────────────────────────────────
# The body of /v1/completions.

DEFAULT_MAX_TOKENS = 16


class CompletionFields(StructuredFields, SamplingFields):
    """Prompts to be continued."""

    prompt: Prompt
    logprobs: Count | None = within(0, MAX_LOGPROBS)
    best_of: Count | None = None
    echo: bool | None = None
    # False: the prompt's text has no special tokens around it.
    add_special_tokens: bool | None = None
    suffix: Unsupported = None
    prompt_embeds: Unsupported = None

    def refuse_unsupported(self, where: str = "") -> None:
        super().refuse_unsupported(where)
        if self.best_of is not None and self.best_of != self.choices():
            message = f"Rota does not support best_of other than n; {advice_on('best_of')}."
            raise RequestError.bad_field("best_of", message)

    @property
    def is_prompt_scored(self) -> bool:
        """An echo with logprobs also has the prompt's log-probabilities."""
        return bool(self.echo) and self.logprobs is not None

    def params(self, tokenizer: Tokenizer) -> SamplingParams:
        """Sampling parameters of the first choice. If only the prompt comes back, one token is made and dropped."""
        limit = self.output_limit()
        params = self.sampling(limit or 1, self.logprobs, tokenizer)
        if self.is_prompt_scored:
            if self.prompt_logprobs not in (None, self.logprobs):
                message = "prompt_logprobs and logprobs disagree about the prompt that is echoed; send one of them."
                raise RequestError.bad_field("prompt_logprobs", message)
            params = replace(params, prompt_logprobs=self.logprobs)
        grammar = self.grammar()
        # A dropped token must not end the answer with 'stop'.
        return guided(params, grammar, tokenizer.eos_ids) if limit else replace(params, stop_token_ids=frozenset())

    def reading(self, limit: int) -> PromptReading:
        """How the prompts are read. The answer has up to `limit` tokens."""
        return PromptReading(self.truncate_prompt_tokens, limit or 1, self.add_special_tokens is not False)

    def output_limit(self) -> int:
        """The most output tokens. 0: only the prompt comes back."""
        asked = self.asked_tokens()
        if asked == 0 and not self.echo:
            message = f"{self.limit_param} must be at least 1, not 0, unless echo is true."
            raise RequestError.bad_field(self.limit_param, message)
        return DEFAULT_MAX_TOKENS if asked is None else asked


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall(OpenAiCall):
    """Prompts to be continued. They have their texts if they are echoed."""

    is_echoed: bool


def read_completion(texts: Texts, raw: bytes) -> CompletionCall:
    """Read a body. Raises RequestError for the first field that is wrong."""
    fields = read_body(CompletionFields, raw, texts.unknown)
    fields.refuse_unsupported()
    limit, shared = fields.output_limit(), fields.shared()
    sampling = fields.params(texts.tokenizer)
    is_echoed = bool(fields.echo)
    prompts = texts.tokenized(fields.prompt, is_echoed=is_echoed, reading=fields.reading(limit))
    texts.check_count(len(prompts.tokens), fields.choices())
    return CompletionCall(
        **shared,
        prompts=prompts,
        samplings=(sampling,),
        has_output=limit > 0,
        limit_param=fields.limit_param,
        has_logprobs=fields.logprobs is not None,
        is_echoed=is_echoed,
        ignored=texts.unknown.ignored,
    )


async def completions(context: AppContext, http: HttpRequest) -> Response:
    """Continue prompts."""
    return await respond(context, http, read_completion, CompletionWriter, "cmpl-")


class CompletionWriter(OpenAiWriter):
    """A completion: text, and log-probabilities as four parallel lists."""

    event_kind = whole_kind = "text_completion"

    def __init__(self, answer: Answer, call: CompletionCall) -> None:
        super().__init__(answer, call)
        self._call = call
        self._prompts = [request.prompt for request in answer.requests]
        shown = call.text.shown_of(self.namer.pieces)
        self._logprobs = [
            CompletionLogprobs(self.namer, prompt if call.is_echoed else (), shown)
            for prompt in self._prompts
            if call.has_logprobs
        ]
        self._told: set[int] = set()

    def piece(self, delta: Delta) -> dict[str, Any] | None:
        return self.complete(delta) if delta.has_news or (self._call.tells_tokens and delta.tokens) else None

    def complete(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.position,
            "text": delta.said.content,
            "logprobs": self._logprobs[delta.position].shape(delta) if self._logprobs else None,
            "finish_reason": delta.finish_reason,
            **(self._tokens(delta) if self._call.tells_tokens else {}),
            **(self._scores(delta) if self._call.tells_prompt_logprobs else {}),
        }

    def _tokens(self, delta: Delta) -> dict[str, Any]:
        """vLLM's fields. The prompt's tokens come once."""
        told = {"token_ids": delta.tokens}
        if delta.position not in self._told:
            self._told.add(delta.position)
            told["prompt_token_ids"] = list(self._prompts[delta.position])
        return told

    def _scores(self, delta: Delta) -> dict[str, Any]:
        return {"prompt_logprobs": prompt_logprobs(self.namer.pieces, self._prompts[delta.position], delta.scores)}
