"""The sampling fields that all of OpenAI's routes share, and those that other servers' clients add."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rota.core.errors import RequestError
from rota.core.request import MAX_SEED, SamplingParams
from rota.server.fields import CacheSalt, Count, Fields, Unsupported, within
from rota.server.sampling import CommonSampling


class StreamOptions(Fields):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


@dataclass(frozen=True, slots=True)
class ModelNames:
    """How a call names its model."""

    model: str | None = None
    lora_path: str | None = None

    @property
    def param(self) -> str:
        """The field that names the model or adapter."""
        return "lora_path" if self.lora_path else "model"


class SamplingFields(CommonSampling):
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
    # The client's own user. It changes nothing about the answer.
    user: str | None = None
    cache_salt: CacheSalt | None = None
    min_tokens: Unsupported = None

    def usage_wanted(self) -> StreamOptions:
        """Which events of a stream have the number of tokens."""
        if self.stream_options and not self.stream:
            raise RequestError.bad_field("stream_options", "stream_options needs stream to be true.")
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
    def names(self) -> ModelNames:
        return ModelNames(self.model, self.lora_path)

    @property
    def client_names(self) -> Mapping[str, str]:
        return {"max_new_tokens": self.limit_param}

    def sampling(self, max_tokens: int, logprobs: int | None, eos_ids: frozenset[int]) -> SamplingParams:
        """Sampling parameters of the first choice."""
        return self.engine_params(eos_ids, max_new_tokens=max_tokens, logprobs=logprobs, seed=self.seed)
