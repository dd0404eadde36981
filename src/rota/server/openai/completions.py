"""POST /v1/completions continues prompts, in OpenAI's shape."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest

from rota.core.errors import RequestError
from rota.core.request import MAX_LOGPROBS, SamplingParams
from rota.server.answers.answer import AnswerChunk, Choice, ParsedCall, SentAs, requests_for
from rota.server.answers.respond import respond
from rota.server.call import CallOptions
from rota.server.calls.fields import Count, Unsupported, advice_on, read_body, within
from rota.server.calls.prompts import CallPrompts, Prompt, PromptReading, Texts, Tokens
from rota.server.calls.reading_room import AskedModels
from rota.server.calls.sampling import guided
from rota.server.context import AppContext
from rota.server.docs import gives, takes
from rota.server.openai.sampling_fields import ModelNames, SamplingFields, StreamOptions, model_for
from rota.server.openai.structured_fields import StructuredFields
from rota.server.openai.writer import CompletionBody, CompletionLogprobs, OpenAiWriter, TokenNamer, prompt_logprobs
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


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """What the route needs of a body. `prompts` have their texts if they are echoed."""

    names: ModelNames
    is_streamed: bool
    options: StreamOptions
    choices: int
    has_output: bool
    has_logprobs: bool
    is_echoed: bool
    sampling: SamplingParams
    prompts: CallPrompts
    call_options: CallOptions
    tells_prompt_logprobs: bool
    limit_param: str  # the client's field that limits the output

    @property
    def asked_models(self) -> AskedModels:
        return self.names.asked


def read_completion(texts: Texts, raw: bytes) -> CompletionCall:
    """Read a body. Raises RequestError for the first field that is wrong."""
    fields = read_body(CompletionFields, raw)
    fields.refuse_unsupported()
    limit, choices, options = fields.output_limit(), fields.choices(), fields.usage_wanted()
    sampling = fields.params(texts.tokenizer)
    is_echoed = bool(fields.echo)
    prompts = texts.tokenized(fields.prompt, is_echoed=is_echoed, reading=fields.reading(limit))
    texts.check_count(len(prompts.tokens), choices)
    return CompletionCall(
        names=fields.names,
        is_streamed=bool(fields.stream),
        options=options,
        choices=choices,
        has_output=limit > 0,
        has_logprobs=fields.logprobs is not None,
        is_echoed=is_echoed,
        sampling=sampling,
        prompts=prompts,
        call_options=fields.call_options(),
        tells_prompt_logprobs=fields.prompt_logprobs is not None,
        limit_param=fields.limit_param,
    )


def install_completions_route(app: FastAPI, context: AppContext) -> None:
    @app.post("/v1/completions", openapi_extra=takes(CompletionFields), responses=gives(CompletionBody, CompletionBody))
    async def completions(http: HttpRequest) -> Response:
        """Continue prompts."""
        call = context.identify(http)
        read = await context.read(call.key, http, read_completion)
        call = context.named(http, call, read.call_options)
        model = model_for(context, call, read.names, read.call_options)
        answer_id = f"cmpl-{call.name}"
        parsed = ParsedCall(
            call,
            answer_id,
            requests_for(call, answer_id, model, read.prompts.tokens, read.sampling, read.choices, read.call_options),
            read.choices,
            openings=tuple(AnswerChunk(text) for text in read.prompts.texts for _ in range(read.choices)),
            has_output=read.has_output,
            sent_as=tuple(SentAs(param, read.names.param) for param in read.prompts.params),
            limit_param=read.limit_param,
            text=read.call_options.text,
            chosen=(model,) * len(read.prompts.tokens),
        )
        prompts = [request.prompt for request in parsed.requests]
        writer = CompletionWriter(answer_id, model.adapter.name, read, prompts, context.tokenizer)
        return await respond(context, http, parsed, writer, read.is_streamed)


class CompletionWriter(OpenAiWriter):
    """A completion: text, and log-probabilities as four parallel lists."""

    event_kind = whole_kind = "text_completion"

    def __init__(
        self, answer_id: str, model: str, read: CompletionCall, prompts: list[Tokens], tokenizer: Tokenizer
    ) -> None:
        """`prompts`: one per choice, by position."""
        super().__init__(answer_id, model, read.options)
        self._read = read
        self._prompts = prompts
        self._pieces = tokenizer.pieces
        namer = TokenNamer(tokenizer.pieces, read.call_options.names_by_id)
        shown = read.call_options.text.shown_of(tokenizer.pieces)
        self._logprobs = [
            CompletionLogprobs(namer, prompt if read.is_echoed else (), shown)
            for prompt in prompts
            if read.has_logprobs
        ]
        self._told: set[int] = set()

    def piece(self, choice: Choice, chunk: AnswerChunk) -> dict[str, Any] | None:
        has_tokens = self._read.call_options.tells_tokens and chunk.tokens
        return self.complete(choice, chunk) if chunk.has_news or has_tokens else None

    def complete(self, choice: Choice, chunk: AnswerChunk) -> dict[str, Any]:
        return {
            "index": choice.position,
            "text": chunk.text,
            "logprobs": self._logprobs[choice.position].shape(chunk) if self._logprobs else None,
            "finish_reason": chunk.finish_reason,
            **(self._tokens(choice, chunk) if self._read.call_options.tells_tokens else {}),
            **(self._scores(choice, chunk) if self._read.tells_prompt_logprobs else {}),
        }

    def _tokens(self, choice: Choice, chunk: AnswerChunk) -> dict[str, Any]:
        """vLLM's fields. The prompt's tokens come once."""
        told = {"token_ids": chunk.tokens}
        if choice.position not in self._told:
            self._told.add(choice.position)
            told["prompt_token_ids"] = list(self._prompts[choice.position])
        return told

    def _scores(self, choice: Choice, chunk: AnswerChunk) -> dict[str, Any]:
        return {"prompt_logprobs": prompt_logprobs(self._pieces, self._prompts[choice.position], chunk.scores)}
