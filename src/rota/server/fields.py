"""The fields of a request's body, and what they mean to the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.request import MAX_SEED, SamplingParams

MAX_CHOICES = 128

Prompt = str | list[str] | list[int] | list[list[int]]
Body = TypeVar("Body", bound=BaseModel)


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class SamplingFields(BaseModel):
    """What every generating route takes. Null is the same as leaving a field out."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    # Identifies the client's client; it changes nothing about the answer.
    user: str | None = None

    def choices(self) -> int:
        """How many answers each prompt gets."""
        count = 1 if self.n is None else self.n
        if not 1 <= count <= MAX_CHOICES:
            raise RequestError.bad_field("n", f"n must be between 1 and {MAX_CHOICES}, not {count}.")
        return count

    def wants_usage(self) -> bool:
        """Whether a stream ends with the number of tokens."""
        if self.stream_options and not self.stream:
            raise RequestError.bad_field("stream_options", "stream_options needs stream to be true.")
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, default_max_tokens: int, logprobs: int | None, eos_ids: frozenset[int]) -> SamplingParams:
        """Sampling parameters of the first choice; raises RequestError in the words the client used."""
        same_names = (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "seed",
        )
        given = {name: value for name in same_names if (value := getattr(self, name)) is not None}
        # Clients of other servers say -1 or 0 for "off".
        given["top_k"] = None if self.top_k in (-1, 0) else self.top_k
        given["max_new_tokens"] = default_max_tokens if self.max_tokens is None else self.max_tokens
        given["logprobs"] = logprobs
        given["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        given["ignore_eos"] = bool(self.ignore_eos)
        given["stop_token_ids"] = frozenset(self.stop_token_ids or ()) | (frozenset() if self.ignore_eos else eos_ids)
        try:
            return SamplingParams.from_fields(given)
        except RequestError as error:
            raise RequestError(_in_client_words(error.fault)) from None


class CompletionFields(SamplingFields):
    """The body of /v1/completions."""

    DEFAULT_MAX_TOKENS: ClassVar[int] = 16

    prompt: Prompt
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    logit_bias: dict[str, float] | None = None

    def refuse_unsupported(self) -> None:
        """Values that would change the answer and cannot: never ignored."""
        if self.best_of is not None and self.best_of != self.choices():
            raise RequestError.bad_field("best_of", "best_of is not supported unless it equals n.")
        for name in ("echo", "suffix", "logit_bias"):
            if getattr(self, name):
                raise RequestError.bad_field(name, f"{name} is not supported; leave it out.")


def read_body(kind: type[Body], raw: bytes) -> Body:
    """Parse a body; raises RequestError that names the first field that is wrong."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise _explain(kind, error.errors()[0]) from None


def seeded(sampling: SamplingParams, choice: int) -> SamplingParams:
    """The parameters of a further choice: with a seed it must not repeat the first."""
    if sampling.seed is None or choice == 0:
        return sampling
    return replace(sampling, seed=(sampling.seed + choice) % (MAX_SEED + 1))


def _explain(kind: type[BaseModel], problem: Any) -> RequestError:
    field = str(problem["loc"][0]) if problem["loc"] else ""
    match problem["type"]:
        case "json_invalid":
            return RequestError(Fault(FaultCode.BAD_FIELD, f"The body is not JSON: {problem['ctx']['error']}."))
        case "missing":
            return RequestError.bad_field(field, f"{field} is missing.")
        case "extra_forbidden":
            path = ".".join(map(str, problem["loc"]))
            known = kind.model_fields if path == field else StreamOptions.model_fields
            return RequestError.bad_field(path, f"'{path}' is not a field; the fields are {', '.join(known)}.")
    if field == "prompt":
        wanted = "must be a text, a list of texts, a list of token ids or a list of such lists"
    elif field == "stop":
        wanted = "must be a text or a list of texts"
    else:
        wanted = problem["msg"].removeprefix("Input ")
    return RequestError.bad_field(field, f"{field or 'The body'} {wanted}.")


def _in_client_words(fault: Fault) -> Fault:
    """The engine says max_new_tokens where OpenAI's clients say max_tokens."""
    if fault.param != "max_new_tokens":
        return fault
    return replace(fault, param="max_tokens", message=fault.message.replace("max_new_tokens", "max_tokens"))
