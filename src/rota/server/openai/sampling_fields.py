"""The sampling fields that OpenAI's routes share, and the fields of other servers' clients that ask for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rota.core.errors import RequestError
from rota.core.request import MAX_LOGPROBS, MAX_SEED, SamplingParams
from rota.server.calls.call import Call, ModelNames
from rota.server.calls.fields import CacheSalt, Count, Fields, Unsupported, unless, within
from rota.server.calls.known_fields import advice_on
from rota.server.calls.sampling import CommonSampling
from rota.text.stream import TextOptions
from rota.text.tokenizer import Tokenizer

# ── foreign fields ──────────────────────────────────────────────────────────────────────────────────────────────────
# Fields that vLLM's and SGLang's clients send to OpenAI's routes, without support: what asks for nothing is taken.


class ForeignFields(Fields):
    """Beam search, code for the sampler, other inputs than text, and how servers of another kind share work."""

    use_beam_search: Unsupported = None
    length_penalty: Unsupported = unless(1.0)
    early_stopping: Unsupported = None
    detokenize: bool | None = None
    stream_reasoning: bool | None = None
    repetition_detection: Unsupported = None
    thinking_token_budget: Unsupported = None
    stop_regex: Unsupported = None
    logits_processors: Unsupported = None
    custom_logit_processor: Unsupported = None
    custom_params: Unsupported = None
    vllm_xargs: Unsupported = None
    mm_processor_kwargs: Unsupported = None
    media_io_kwargs: Unsupported = None
    max_dynamic_patch: Unsupported = None
    min_dynamic_patch: Unsupported = None
    use_audio_in_video: Unsupported = None
    return_hidden_states: Unsupported = None
    return_routed_experts: Unsupported = None
    return_cached_tokens_details: Unsupported = None
    session_params: Unsupported = None
    extra_key: Unsupported = None
    kv_transfer_params: Unsupported = None
    bootstrap_host: Unsupported = None
    bootstrap_port: Unsupported = None
    bootstrap_room: Unsupported = None
    data_parallel_rank: Unsupported = None
    routed_dp_rank: Unsupported = None

    def refuse_unsupported(self, where: str = "") -> None:
        super().refuse_unsupported(where)
        for name in ("detokenize", "stream_reasoning"):
            if getattr(self, name) is False:
                message = f"Rota does not support {name} other than true; {advice_on(name)}."
                raise RequestError.bad_field(name, message)


# ── sampling fields ─────────────────────────────────────────────────────────────────────────────────────────────────


class StreamOptions(Fields):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAiCall(Call):
    """What the answers of OpenAI's routes tell besides their text."""

    options: StreamOptions
    has_logprobs: bool
    tells_prompt_logprobs: bool
    # The answer has the tokens of the prompt and of itself.
    tells_tokens: bool
    # Log-probabilities name a token by its id.
    names_by_id: bool


class SamplingFields(ForeignFields, CommonSampling):
    """The fields of every OpenAI route."""

    model: str | None = None
    # SGLang's clients name the base model in `model`, and an adapter here.
    lora_path: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = within(1)
    # The newer name of max_tokens.
    max_completion_tokens: Count | None = within(1)
    seed: int | None = within(0, MAX_SEED)
    # The client's own user, who stays with one target of a traffic route.
    user: str | None = None
    cache_salt: CacheSalt | None = None
    # A higher one goes first, up to the priority of the key.
    priority: Count | None = None
    # The name of the call: vLLM's field, and SGLang's.
    request_id: str | None = None
    rid: str | None = None
    min_tokens: Count | None = within(0)
    prompt_logprobs: Count | None = within(0, MAX_LOGPROBS)
    truncate_prompt_tokens: Count | None = within(-1)
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    # Log-probabilities name a token by its id.
    return_tokens_as_token_ids: bool | None = None

    def shared(self) -> dict[str, Any]:
        """The parts of a call that every route reads alike."""
        return {
            "models": (ModelNames.of(self.model, self.lora_path),),
            "choices": self.choices(),
            "is_streamed": bool(self.stream),
            "text": self.text_options(),
            "cache_salt": self.cache_salt,
            "asker": self.asker(),
            "priority": self.priority,
            "name": self.rid if self.request_id is None else self.request_id,
            "name_param": "rid" if self.request_id is None else "request_id",
            "options": self.usage_wanted(),
            "tells_prompt_logprobs": self.prompt_logprobs is not None,
            "tells_tokens": bool(self.return_token_ids),
            "names_by_id": bool(self.return_tokens_as_token_ids),
        }

    def asker(self) -> str | None:
        """The first name that the client gives to who asks."""
        return self.user or self.cache_salt

    def text_options(self) -> TextOptions:
        keeps_stop = bool(self.include_stop_str_in_output or self.no_stop_trim)
        return replace(super().text_options(), keeps_stop=keeps_stop)

    def usage_wanted(self) -> StreamOptions:
        """Which events of a stream have the number of tokens."""
        if self.stream_options and not self.stream:
            raise RequestError.bad_field("stream_options", "stream_options needs stream to be true.")
        if self.stream_options:
            self.stream_options.refuse_unsupported("stream_options.")
        return self.stream_options or StreamOptions()

    def asked_tokens(self) -> int | None:
        """The number of tokens in either field. Raises RequestError if the two disagree."""
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            message = f"max_tokens ({old}) and max_completion_tokens ({new}) disagree; send one of them."
            raise RequestError.bad_field("max_completion_tokens", message)
        return old if new is None else new

    @property
    def limit_param(self) -> str:
        """The field that limits the number of tokens."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def client_names(self) -> Mapping[str, str]:
        return {"max_new_tokens": self.limit_param, "min_new_tokens": "min_tokens"}

    def sampling(self, max_tokens: int, logprobs: int | None, tokenizer: Tokenizer) -> SamplingParams:
        """Sampling parameters of the first choice."""
        if self.prompt_logprobs is not None and self.stream:
            message = "prompt_logprobs come only with a whole answer; leave out stream."
            raise RequestError.bad_field("prompt_logprobs", message)
        return self.engine_params(
            tokenizer,
            max_new_tokens=max_tokens,
            min_new_tokens=self.min_tokens or 0,
            logprobs=logprobs,
            prompt_logprobs=self.prompt_logprobs,
            seed=self.seed,
        )
