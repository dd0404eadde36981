"""How to choose tokens and when to stop, in the fields that OpenAI's clients send and in those of other servers'."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from rota.core.adapter import Adapter
from rota.core.errors import Fault, RequestError
from rota.core.request import MAX_SEED, SamplingParams
from rota.server.fields import Count, Fields, within
from rota.server.front import Front
from rota.server.open_answers import Call

MAX_CHOICES = 128
MAX_STOPS = 32
MAX_STOP_LENGTH = 1000

# Empty ones are refused where they are read, in a better sentence than a minLength would give.
Stop = Annotated[str, Field(json_schema_extra={"minLength": 1, "maxLength": MAX_STOP_LENGTH})]

_SAME_NAMES = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)


class StreamOptions(Fields):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(Fields):
    """What every route of OpenAI's takes."""

    # Where the client's word is not the engine's.
    CLIENT_WORDS: ClassVar[Mapping[str, str]] = {"max_new_tokens": "max_tokens"}

    model: str | None = None
    # SGLang's clients name the base model above, and an adapter here.
    lora_path: str | None = None
    n: Count | None = within(1, MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = within(1)
    temperature: float | None = within(0.0, 100.0)
    top_p: float | None = within(0.001, 1.0)
    top_k: Count | None = within(-1)
    min_p: float | None = within(0.0, 1.0)
    repetition_penalty: float | None = within(0.001, 10.0)
    presence_penalty: float | None = within(-2.0, 2.0)
    frequency_penalty: float | None = within(-2.0, 2.0)
    seed: int | None = within(0, MAX_SEED)
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True)] | None = Field(
        default=None, json_schema_extra={"maxItems": MAX_STOPS}
    )
    stop_token_ids: Annotated[list[Count], Field(fail_fast=True, max_length=1000)] | None = None
    ignore_eos: bool | None = None
    # Who the client's client is: it changes nothing about the answer.
    user: str | None = None

    def choices(self) -> int:
        """How many answers each prompt gets."""
        count = 1 if self.n is None else self.n
        if not 1 <= count <= MAX_CHOICES:
            raise RequestError.bad_field("n", f"n must be between 1 and {MAX_CHOICES}, not {count}.")
        return count

    def usage_wanted(self) -> StreamOptions:
        """Where a stream tells the number of tokens."""
        if self.stream_options and not self.stream:
            raise RequestError.bad_field("stream_options", "stream_options needs stream to be true.")
        return self.stream_options or StreamOptions()

    def sampling(self, max_tokens: int, logprobs: int | None, eos_ids: frozenset[int]) -> SamplingParams:
        """Sampling parameters of the first choice; raises RequestError in the words the client used."""
        given: dict[str, Any] = {name: value for name in _SAME_NAMES if (value := getattr(self, name)) is not None}
        # Clients of other servers say -1 or 0 for "off".
        given["top_k"] = None if self.top_k in (-1, 0) else self.top_k
        given["max_new_tokens"] = max_tokens
        given["logprobs"] = logprobs
        given["stop"] = checked_stops(self.stop)
        given["ignore_eos"] = bool(self.ignore_eos)
        given["stop_token_ids"] = frozenset(self.stop_token_ids or ()) | (frozenset() if self.ignore_eos else eos_ids)
        try:
            return SamplingParams.from_fields(given)
        except RequestError as error:
            raise RequestError(self._in_client_words(error.fault)) from None

    def _in_client_words(self, fault: Fault) -> Fault:
        word = self.CLIENT_WORDS.get(fault.param or "")
        return replace(fault, param=word, message=fault.message.replace(fault.param or "", word)) if word else fault


def checked_stops(stop: str | list[str] | None) -> tuple[str, ...]:
    """Stop strings, few and short enough to be looked for after every token."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise RequestError.bad_field("stop", f"stop holds {len(stops)} texts; at most {MAX_STOPS} are watched for.")
    for text in stops:
        if len(text) > MAX_STOP_LENGTH:
            message = f"stop holds a text of {len(text)} characters; at most {MAX_STOP_LENGTH} are watched for."
            raise RequestError.bad_field("stop", message)
    return stops


def model_for(front: Front, call: Call, fields: SamplingFields) -> Adapter:
    """Whom a call asks for, by either name; raises RequestError if two are named, or one that it may not use."""
    if not fields.lora_path:
        return front.access.find(call.key, fields.model)
    adapter = front.access.find(call.key, fields.lora_path)
    if front.registry.get(fields.model) not in (front.registry.base, adapter):
        message = f"model and lora_path name two different adapters, '{fields.model}' and '{fields.lora_path}'."
        raise RequestError.bad_field("lora_path", message)
    return adapter
