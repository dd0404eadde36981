"""How to choose tokens and when to stop, in the fields that OpenAI's clients send and in those of other servers'."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from rota.core.adapter import Adapter
from rota.core.errors import Fault, RequestError
from rota.core.request import MAX_SEED, SamplingParams
from rota.server.fields import Count, Fields, within
from rota.server.front import Front
from rota.server.open_answers import Call
from rota.server.sampling import CommonSampling


class StreamOptions(Fields):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(CommonSampling):
    """What every route of OpenAI's takes."""

    # Where the client's word is not the engine's.
    CLIENT_WORDS: ClassVar[Mapping[str, str]] = {"max_new_tokens": "max_tokens"}

    model: str | None = None
    # SGLang's clients name the base model above, and an adapter here.
    lora_path: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = within(1)
    seed: int | None = within(0, MAX_SEED)
    # Who the client's client is: it changes nothing about the answer.
    user: str | None = None

    def usage_wanted(self) -> StreamOptions:
        """Where a stream tells the number of tokens."""
        if self.stream_options and not self.stream:
            raise RequestError.bad_field("stream_options", "stream_options needs stream to be true.")
        return self.stream_options or StreamOptions()

    def sampling(self, max_tokens: int, logprobs: int | None, eos_ids: frozenset[int]) -> SamplingParams:
        """Sampling parameters of the first choice; raises RequestError in the words the client used."""
        given = {"max_new_tokens": max_tokens, "logprobs": logprobs, "seed": self.seed, **self.engine_fields(eos_ids)}
        try:
            return SamplingParams.from_fields(given)
        except RequestError as error:
            raise RequestError(self._in_client_words(error.fault)) from None

    def _in_client_words(self, fault: Fault) -> Fault:
        word = self.CLIENT_WORDS.get(fault.param or "")
        return replace(fault, param=word, message=fault.message.replace(fault.param or "", word)) if word else fault


def model_for(front: Front, call: Call, fields: SamplingFields) -> Adapter:
    """Whom a call asks for, by either name; raises RequestError if two are named, or one that it may not use."""
    if not fields.lora_path:
        return front.access.find(call.key, fields.model)
    adapter = front.access.find(call.key, fields.lora_path)
    if front.registry.get(fields.model) not in (front.registry.base, adapter):
        message = f"model and lora_path name two different adapters, '{fields.model}' and '{fields.lora_path}'."
        raise RequestError.bad_field("lora_path", message)
    return adapter
