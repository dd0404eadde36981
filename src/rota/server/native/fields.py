"""The body of SGLang's /generate is turned into the engine's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from rota.core.errors import RequestError
from rota.core.request import MAX_LOGPROBS, MAX_SEED, SamplingParams
from rota.server.fields import CacheSalt, Count, Fields, Unsupported, unless, within
from rota.server.openai.sampling_fields import StreamOptions
from rota.server.sampling import CommonSampling
from rota.server.structured import FormFields, guided
from rota.text.tokenizer import Tokenizer

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


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
# Checked in one pass where it is tokenized.
InputIds = Annotated[Any, WithJsonSchema({"anyOf": [_IDS, {"type": "array", "items": _IDS, "minItems": 1}]})]


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
    def param(self) -> str:
        return "text" if self.text is not None else "input_ids"

    @property
    def choices_param(self) -> str:
        return f"{self._first_sampling}.n"

    @property
    def limit_param(self) -> str:
        """The field that limits the number of tokens."""
        return f"{self._first_sampling}.max_new_tokens"

    @property
    def _first_sampling(self) -> str:
        return "sampling_params.0" if isinstance(self.sampling_params, list) else "sampling_params"

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
