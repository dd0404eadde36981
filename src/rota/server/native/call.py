"""The body of /generate becomes a call: prompts, their adapters and their sampling parameters, one of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import Field, WithJsonSchema

from rota.core.errors import RequestError
from rota.core.request import MAX_LOGPROBS, MAX_SEED, SamplingParams
from rota.server.call import checked_name
from rota.server.calls.call import Call, ModelNames
from rota.server.calls.fields import CacheSalt, Count, Fields, Unsupported, read_body, unless, within
from rota.server.calls.prompts import TOKEN_LISTS, TOKENS, CallPrompts, Texts
from rota.server.calls.sampling import CommonSampling, FormFields, guided, placed
from rota.server.openai.sampling_fields import StreamOptions
from rota.text.stream import TextOptions
from rota.text.tokenizer import Tokenizer

# ── fields ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# The body of SGLang's /generate is turned into the engine's parameters.

DEFAULT_MAX_NEW_TOKENS = 128


class NativeSampling(FormFields, CommonSampling):
    """One prompt's sampling_params."""

    max_new_tokens: Count | None = within(1)
    sampling_seed: int | None = within(0, MAX_SEED)
    stream_interval: Unsupported = unless(1)
    min_new_tokens: Count | None = within(0)
    stop_regex: Unsupported = None
    custom_params: Unsupported = None

    @property
    def client_names(self) -> Mapping[str, str]:
        return {"seed": "sampling_seed"}

    def sampling(self, logprobs: int | None, prompt_logprobs: int | None, tokenizer: Tokenizer) -> SamplingParams:
        """Raises RequestError for impossible values, and for values without support that would change the answer."""
        self.refuse_unsupported()
        params = self.engine_params(
            tokenizer,
            min_new_tokens=self.min_new_tokens or 0,
            max_new_tokens=DEFAULT_MAX_NEW_TOKENS if self.max_new_tokens is None else self.max_new_tokens,
            seed=self.sampling_seed,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        return guided(params, self.grammar(), tokenizer.eos_ids)


# Checked in one pass where it is tokenized.
InputIds = Annotated[Any, WithJsonSchema({"anyOf": [TOKENS, TOKEN_LISTS]})]


class GenerateFields(Fields):
    """One prompt or several. A single value counts for all prompts."""

    text: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    input_ids: InputIds = None
    sampling_params: NativeSampling | Annotated[list[NativeSampling], Field(fail_fast=True)] | None = None
    lora_path: str | Annotated[list[str | None], Field(fail_fast=True)] | None = None
    rid: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: Count | None = None
    top_logprobs_num: Count | None = within(0, MAX_LOGPROBS)
    return_text_in_logprobs: bool | None = None
    cache_salt: CacheSalt | None = None
    # A higher one goes first, up to the priority of the key.
    priority: Count | None = None
    # These change nothing: every answer counts its tokens, and the operator decides what is logged.
    stream_options: StreamOptions | None = None
    log_metrics: bool | None = None
    no_logs: bool | None = None
    # Who asks.
    conversation_id: str | None = None
    token_ids_logprob: Unsupported = None
    return_hidden_states: Unsupported = None
    return_routed_experts: Unsupported = None
    return_entropy: Unsupported = None
    input_embeds: Unsupported = None
    image_data: Unsupported = None
    video_data: Unsupported = None
    audio_data: Unsupported = None
    modalities: Unsupported = None
    session_params: Unsupported = None
    lora_id: Unsupported = None
    custom_logit_processor: Unsupported = None
    bootstrap_host: Unsupported = None
    bootstrap_port: Unsupported = None
    bootstrap_room: Unsupported = None
    data_parallel_rank: Unsupported = None
    background: Unsupported = None
    extra_key: Unsupported = None

    @property
    def is_list(self) -> bool:
        """Whether prompts came as a list, also a list of one."""
        if isinstance(self.input_ids, list):
            return isinstance(self.input_ids[0], list)
        return isinstance(self.text, list)

    @property
    def name(self) -> str | None:
        """The client's name of the whole call."""
        return self.rid if isinstance(self.rid, str) else None

    def prompt(self) -> Any:
        """The texts or the token ids."""
        if (self.text is None) == (self.input_ids is None):
            raise RequestError.bad_field("text", "Send either text or input_ids.")
        if self.text is not None:
            return self.text
        match self.input_ids:
            case [int() | list(), *_]:
                return self.input_ids
        raise RequestError.bad_field("input_ids", "input_ids must be a list of token ids, or a list of such lists.")

    def logprobs(self) -> int | None:
        """How many alternatives come with each token's own log-probability. None: no log-probabilities."""
        if self.top_logprobs_num and not self.return_logprob:
            raise RequestError.bad_field("top_logprobs_num", "top_logprobs_num needs return_logprob to be true.")
        if not 0 <= (count := self.top_logprobs_num or 0) <= MAX_LOGPROBS:
            message = f"top_logprobs_num must be between 0 and {MAX_LOGPROBS}, not {count}."
            raise RequestError.bad_field("top_logprobs_num", message)
        return count if self.return_logprob else None

    def prompt_logprobs(self) -> int | None:
        """The same for each token of the prompt."""
        return self.logprobs() if self.logprob_start_len == 0 else None

    def refuse_unsupported(self, where: str = "") -> None:
        super().refuse_unsupported(where)
        if self.logprob_start_len not in (None, -1, 0):
            message = (
                "logprob_start_len must be -1, for the answer's tokens alone, or 0, for the prompt's tokens too, not "
                f"{self.logprob_start_len}."
            )
            raise RequestError.bad_field("logprob_start_len", message)
        if self.logprob_start_len == 0 and not self.return_logprob:
            raise RequestError.bad_field("logprob_start_len", "logprob_start_len needs return_logprob to be true.")


Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall(Call):
    """A call as SGLang's: prompts, adapters and sampling parameters stand in the same order."""

    # The prompts came as a list: so do the answers.
    is_list: bool = False
    # The names of the requests, one for each prompt. None: they are made from the call's name.
    names: tuple[str, ...] | None = None
    has_logprobs: bool = False
    has_top: bool = False  # log-probabilities of other tokens too
    has_text: bool = False  # log-probabilities with the text of each token

    def request_name(self, answer_id: str, prompt: int, choice: int) -> str:
        name = self.names[prompt] if self.names else f"{answer_id}-{prompt}" if self.is_list else answer_id
        return f"{name}-{choice}" if self.choices > 1 else name


def read_generate(texts: Texts, raw: bytes) -> GenerateCall:
    """Read a body. Raises RequestError if its fields cannot be read at all."""
    fields = read_body(GenerateFields, raw, texts.unknown)
    fields.refuse_unsupported()
    try:
        return _call_of(texts, fields)
    except RequestError as error:
        nothing = CallPrompts((), ())
        return GenerateCall(prompts=nothing, samplings=(), name=fields.name, name_param="rid", fault=error.fault)


def _call_of(texts: Texts, fields: GenerateFields) -> GenerateCall:
    param = "text" if fields.text is not None else "input_ids"
    first_sampling = "sampling_params.0" if isinstance(fields.sampling_params, list) else "sampling_params"
    prompts = texts.tokenized(fields.prompt(), param)
    count = len(prompts.tokens)
    adapters = _one_each("lora_path", _placed("lora_path", fields.lora_path), count)
    sent, choices = _samplings(fields, texts.tokenizer)
    samplings = _one_each("sampling_params", sent, count)
    texts.check_count(count, choices, param, f"{first_sampling}.n")
    return GenerateCall(
        prompts=prompts,
        models=tuple(ModelNames(None, name, place) for place, name in adapters),
        samplings=tuple(samplings),
        choices=choices,
        is_streamed=bool(fields.stream),
        text=_text_options(fields),
        limit_param=f"{first_sampling}.max_new_tokens",
        cache_salt=fields.cache_salt,
        asker=fields.conversation_id or fields.cache_salt,
        priority=fields.priority,
        name=fields.name,
        name_param="rid",
        ignored=texts.unknown.ignored,
        is_list=fields.is_list,
        names=_different(fields.rid, count) if isinstance(fields.rid, list) else None,
        has_logprobs=bool(fields.return_logprob),
        has_top=bool(fields.top_logprobs_num),
        has_text=bool(fields.return_text_in_logprobs),
    )


def _samplings(fields: GenerateFields, tokenizer: Tokenizer) -> tuple[list[SamplingParams], int]:
    """The sampling parameters as they were sent, and the number of answers per prompt."""
    logprobs = fields.logprobs(), fields.prompt_logprobs()
    samplings: list[SamplingParams] = []
    choices: set[int] = set()
    for place, one in _placed("sampling_params", fields.sampling_params or NativeSampling()):
        with _inside(place):
            choices.add(one.choices())
            samplings.append(placed(one.sampling(*logprobs, tokenizer), place))
    if len(choices) > 1:
        raise RequestError.bad_field("sampling_params", "n must be the same for all prompts of a call.")
    return samplings, choices.pop()


def _text_options(fields: GenerateFields) -> TextOptions:
    """Which parts of the answers are text. A call has one stream of text, so its prompts must agree."""
    given = fields.sampling_params or NativeSampling()
    first, *others = [one.text_options() for one in (given if isinstance(given, list) else [given])]
    if any(other != first for other in others):
        message = "skip_special_tokens and no_stop_trim must be the same for all prompts of a call."
        raise RequestError.bad_field("sampling_params", message)
    return first


@contextmanager
def _inside(place: str) -> Iterator[None]:
    """An error in an object's field names the object's place too."""
    try:
        yield
    except RequestError as error:
        raise RequestError.bad_field(f"{place}.{error.fault.param}", error.fault.message) from None


def _different(names: list[str], count: int) -> tuple[str, ...]:
    different = len(set(names))
    if len(names) != count or different != count:
        held = f"{len(names)} names, {different} of them different"
        message = f"rid must hold {count} different names, one per prompt; it holds {held}."
        raise RequestError.bad_field("rid", message)
    return tuple(checked_name(f"rid.{index}", name) for index, name in enumerate(names))


def _placed(param: str, given: Value | list[Value]) -> list[tuple[str, Value]]:
    """Each value that was sent, with its place in the body."""
    if isinstance(given, list):
        return [(f"{param}.{index}", one) for index, one in enumerate(given)]
    return [(param, given)]


def _one_each(param: str, given: Sequence[Value], count: int) -> Sequence[Value]:
    """A single value counts for every prompt."""
    if len(given) == 1:
        return list(given) * count
    if len(given) != count:
        raise RequestError.bad_field(param, f"There are {count} prompts but {len(given)} {param}; give one for each.")
    return given
