"""A request says what was asked, and never what became of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from rota.core.errors import RequestError
from rota.core.grammar import Grammar
from rota.core.ids import BASE, AdapterId, RequestId
from rota.core.tenant import SOLE_TENANT, Tenant

# The last hidden state of a prompt, or the mean of all.
Pooling = Literal["last", "mean"]
MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    `temperature=0` is greedy. `stop` holds strings, or is one, and is watched by the text layer; `stop_token_ids` is
    watched by the scheduler, which does not know what end-of-sequence is unless it is listed there. `logprobs` and
    `prompt_logprobs` say how many of the likeliest tokens are told beside each token of the answer or of the prompt.
    Before `min_new_tokens` no stop token may come. `bad_words` are token sequences that may not come.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    ignore_eos: bool = False
    grammar: Grammar | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_new_tokens: int = 0
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    top_n_sigma: float | None = None

    def __post_init__(self) -> None:
        self._accept_lists()
        _check_whole("max_new_tokens", self.max_new_tokens, 1, None)
        _check_between("temperature", self.temperature, 0.0, 100.0)
        _check_between("top_p", self.top_p, 0.0, 1.0, above=True)
        _check_between("min_p", self.min_p, 0.0, 1.0)
        _check_between("repetition_penalty", self.repetition_penalty, 0.0, 10.0, above=True)
        _check_between("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.top_k is not None:
            _check_whole("top_k", self.top_k, 1, None)
        if self.seed is not None:
            _check_whole("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            _check_whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check_whole("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise RequestError.bad_field("stop", "stop must be a list of strings that are not empty.")
        if not isinstance(self.ignore_eos, bool):
            raise RequestError.bad_field("ignore_eos", f"ignore_eos must be True or False, not {self.ignore_eos!r}.")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise RequestError.bad_field("grammar", f"grammar must be a Grammar, not {self.grammar!r}.")
        self._check_tokens()

    def _accept_lists(self) -> None:
        """A program may give a list for a tuple or a set, one string for a list of one, and biases as a dict."""
        for name in ("stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words"):
            given: object = getattr(self, name)
            kind = frozenset if name == "stop_token_ids" else tuple
            if given is None or isinstance(given, kind):
                continue
            if name == "stop" and isinstance(given, str):
                given = [given]
            if isinstance(given, str | bytes) or not isinstance(given, Iterable):
                raise RequestError.bad_field(name, f"{name} must be a list, not {given!r}.")
            read = given.items() if isinstance(given, Mapping) else given
            object.__setattr__(self, name, kind(tuple(one) if isinstance(one, list) else one for one in read))

    def _check_tokens(self) -> None:
        """What the request says of single tokens. Whether the model has them is for those who know the model."""
        _check_whole("min_new_tokens", self.min_new_tokens, 0, None)
        if self.min_new_tokens > self.max_new_tokens:
            most = f"min_new_tokens must be at most max_new_tokens, which is {self.max_new_tokens}"
            raise RequestError.bad_field("min_new_tokens", f"{most}, not {self.min_new_tokens}.")
        if self.logit_bias:
            _check_biases(self.logit_bias)
        if self.allowed_token_ids is not None:
            _check_ids("allowed_token_ids", self.allowed_token_ids)
        if len(self.bad_words) > MAX_BAD_WORDS:
            message = f"bad_words holds {len(self.bad_words)} words; at most {MAX_BAD_WORDS} are allowed."
            raise RequestError.bad_field("bad_words", message)
        for word in self.bad_words:
            _check_ids("bad_words", word)
        if self.stop_token_ids:
            _check_ids("stop_token_ids", self.stop_token_ids)
        if self.top_n_sigma is not None:
            _check_between("top_n_sigma", self.top_n_sigma, 0.0, 1000.0, above=True)

    @classmethod
    def from_fields(cls, given: Mapping[str, Any]) -> SamplingParams:
        """Build from named values, refusing names that are not fields."""
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise RequestError.bad_field(
                    name, f"'{name}' is not a sampling field; the fields are {', '.join(known)}."
                )
        return cls(**given)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def largest_tokens(self) -> Iterator[tuple[str, int]]:
        """Of each field that names tokens, the largest. A stop token that the model does not have is no error."""
        if self.logit_bias:
            yield "logit_bias", max(token for token, _ in self.logit_bias)
        if self.allowed_token_ids:
            yield "allowed_token_ids", max(self.allowed_token_ids)
        if self.bad_words:
            yield "bad_words", max(max(word) for word in self.bad_words)

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to be continued, by the base model or by one adapter; or, with `pooling`, only to be read.

    Then the request ends with an embedding, made of hidden states behind the last norm, and has no answer.
    """

    request_id: RequestId
    prompt: tuple[int, ...]
    sampling: SamplingParams
    arrived_at: float
    adapter_id: AdapterId = BASE
    tenant: Tenant = SOLE_TENANT
    cache_scope: str = ""  # KV of earlier prompts is found only within the same scope
    # The age at which, without a first token, it goes before others of its tenant; None: never.
    first_token_s: float | None = None
    priority: int = 0  # a higher one goes first, as if it had arrived earlier; a low one never waits for ever
    pooling: Pooling | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise RequestError.bad_field("prompt", "prompt is empty; send at least one token.")
        if self.pooling is not None and self.pooling not in get_args(Pooling):
            known = " or ".join(map(repr, get_args(Pooling)))
            raise RequestError.bad_field("pooling", f"pooling must be {known}, not {self.pooling!r}.")


def _check_whole(name: str, value: object, low: int, high: int | None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError.bad_field(name, f"{name} must be a whole number, not {value!r}.")
    if value < low or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError.bad_field(name, f"{name} must be {limits}, not {value}.")


def _check_between(name: str, value: object, low: float, high: float, above: bool = False) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise RequestError.bad_field(name, f"{name} must be a finite number, not {value!r}.")
    if value < low or value > high or (above and value == low):
        limits = f"above {low:g} and at most {high:g}" if above else f"between {low:g} and {high:g}"
        raise RequestError.bad_field(name, f"{name} must be {limits}, not {value}.")


def _check_biases(biases: Sequence[tuple[int, float]]) -> None:
    if len(biases) > MAX_LOGIT_BIASES:
        message = f"logit_bias names {len(biases)} tokens; at most {MAX_LOGIT_BIASES} are allowed."
        raise RequestError.bad_field("logit_bias", message)
    if wrong := [one for one in biases if not isinstance(one, list | tuple) or len(one) != 2]:
        raise RequestError.bad_field("logit_bias", f"logit_bias must give a bias for each token, not {wrong[0]!r}.")
    _check_ids("logit_bias", [token for token, _ in biases])
    if len({token for token, _ in biases}) < len(biases):
        raise RequestError.bad_field("logit_bias", "logit_bias names a token twice.")
    for _, bias in biases:
        _check_between("logit_bias", bias, -100.0, 100.0)


def _check_ids(name: str, tokens: object) -> None:
    if not isinstance(tokens, Collection) or isinstance(tokens, str):
        raise RequestError.bad_field(name, f"{name} must hold lists of token ids, not {tokens!r}.")
    if not tokens:
        raise RequestError.bad_field(name, f"{name} holds an empty list; name at least one token.")
    wrong = [token for token in tokens if type(token) is not int or token < 0]
    if wrong:
        raise RequestError.bad_field(name, f"{name} must hold token ids, which are whole numbers, not {wrong[0]!r}.")
