"""The sampling fields that OpenAI's and SGLang's routes share are turned into the engine's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from rota.core.errors import Fault, RequestError
from rota.core.request import SamplingParams
from rota.server.fields import Count, within
from rota.server.token_fields import TokenFields
from rota.text.stream import TextOptions
from rota.text.tokenizer import Tokenizer

MAX_CHOICES = 128
MAX_STOPS = 32
MAX_STOP_LENGTH = 1000
MAX_SIGMAS = 1000.0

# Empty strings are refused where they are read, with a better sentence than minLength gives.
Stop = Annotated[str, Field(json_schema_extra={"minLength": 1, "maxLength": MAX_STOP_LENGTH})]

_SAME_NAMES = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


class CommonSampling(TokenFields):
    """The fields that OpenAI's and SGLang's routes share."""

    n: Count | None = within(1, MAX_CHOICES)
    temperature: float | None = within(0.0, 100.0)
    top_p: float | None = within(0.001, 1.0)
    top_k: Count | None = within(-1)
    min_p: float | None = within(0.0, 1.0)
    # llama.cpp's field: only tokens within so many standard deviations of the best one.
    top_n_sigma: float | None = within(-1.0, MAX_SIGMAS)
    repetition_penalty: float | None = within(0.001, 10.0)
    presence_penalty: float | None = within(-2.0, 2.0)
    frequency_penalty: float | None = within(-2.0, 2.0)
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True)] | None = Field(
        default=None, json_schema_extra={"maxItems": MAX_STOPS}
    )
    stop_token_ids: Annotated[list[Count], Field(fail_fast=True, max_length=1000)] | None = None
    ignore_eos: bool | None = None
    # False: the text has special tokens too.
    skip_special_tokens: bool | None = None
    # Tokens follow each other without added spaces, special tokens too, so the field changes nothing.
    spaces_between_special_tokens: bool | None = None
    # SGLang's name: the stop string or token is part of the text.
    no_stop_trim: bool | None = None

    def choices(self) -> int:
        """How many answers each prompt gets."""
        count = 1 if self.n is None else self.n
        if not 1 <= count <= MAX_CHOICES:
            raise RequestError.bad_field("n", f"n must be between 1 and {MAX_CHOICES}, not {count}.")
        return count

    def text_options(self) -> TextOptions:
        """Which parts of the answer are text."""
        return TextOptions(shows_special=self.skip_special_tokens is False, keeps_stop=bool(self.no_stop_trim))

    @property
    def client_names(self) -> Mapping[str, str]:
        """The client's field names by the engine's names, where they differ."""
        return {}

    def engine_params(self, tokenizer: Tokenizer, **others: Any) -> SamplingParams:
        """The engine's parameters; `others` have the engine's names. Raises RequestError with the client's names."""
        given = others | self._engine_fields(tokenizer.eos_ids) | self.token_params(tokenizer)
        self._check_least(given.get("min_new_tokens", 0), given["max_new_tokens"])
        try:
            return SamplingParams.from_fields(given)
        except RequestError as error:
            raise RequestError(self._with_client_name(error.fault)) from None

    def _check_least(self, least: int, most: int) -> None:
        if most > 0 and not 0 <= least <= most:
            name, limit = (self.client_names.get(one, one) for one in ("min_new_tokens", "max_new_tokens"))
            raise RequestError.bad_field(name, f"{name} must be between 0 and {limit} ({most}), not {least}.")

    def _with_client_name(self, fault: Fault) -> Fault:
        engine_name = fault.param or ""
        name = self.client_names.get(engine_name)
        return replace(fault, param=name, message=fault.message.replace(engine_name, name)) if name else fault

    def _engine_fields(self, eos_ids: frozenset[int]) -> dict[str, Any]:
        given: dict[str, Any] = {name: value for name in _SAME_NAMES if (value := getattr(self, name)) is not None}
        # Clients of other servers send -1 or 0 for "off".
        given["top_k"] = None if self.top_k in (-1, 0) else self.top_k
        given["top_n_sigma"] = None if self.top_n_sigma in (-1, 0) else self.top_n_sigma
        given["stop"] = _checked_stops(self.stop)
        given["ignore_eos"] = bool(self.ignore_eos)
        given["stop_token_ids"] = frozenset(self.stop_token_ids or ()) | (frozenset() if self.ignore_eos else eos_ids)
        return given


def _checked_stops(stop: str | list[str] | None) -> tuple[str, ...]:
    """Stop strings. They are few and short, because they are searched after every token."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise RequestError.bad_field("stop", f"stop holds {len(stops)} texts; at most {MAX_STOPS} are allowed.")
    for text in stops:
        if len(text) > MAX_STOP_LENGTH:
            message = f"stop holds a text of {len(text)} characters; at most {MAX_STOP_LENGTH} are allowed."
            raise RequestError.bad_field("stop", message)
    return stops
