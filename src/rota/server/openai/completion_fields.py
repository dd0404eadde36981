"""The body of /v1/completions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rota.core.errors import RequestError
from rota.core.request import MAX_LOGPROBS, SamplingParams
from rota.server.advice import advice_on
from rota.server.call_options import CallOptions
from rota.server.fields import Count, Unsupported, read_body, within
from rota.server.openai.sampling_fields import ModelNames, SamplingFields, StreamOptions
from rota.server.openai.structured_fields import StructuredFields
from rota.server.prompts import Prompt, Prompts, Reading, Texts
from rota.server.reading import AskedModels
from rota.server.structured import guided
from rota.text.tokenizer import Tokenizer

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

    def reading(self, limit: int) -> Reading:
        """How the prompts are read. The answer has up to `limit` tokens."""
        return Reading(self.truncate_prompt_tokens, limit or 1, self.add_special_tokens is not False)

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
    prompts: Prompts
    asks: CallOptions
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
        asks=fields.call_options(),
        tells_prompt_logprobs=fields.prompt_logprobs is not None,
        limit_param=fields.limit_param,
    )
