"""The sampling fields, and the form of an answer, that OpenAI's and SGLang's routes share become the engine's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema
from pydantic_core import from_json

from rota.core.errors import Fault, RequestError
from rota.core.grammar import Grammar
from rota.core.request import MAX_LOGIT_BIASES, SamplingParams
from rota.grammar import texts
from rota.grammar.texts import Tag
from rota.server.calls.fields import Count, Fields, within
from rota.text.stream import TextOptions
from rota.text.tokenizer import Tokenizer

# ── token fields ────────────────────────────────────────────────────────────────────────────────────────────────────
# The fields about single tokens: which are likelier, which alone may come, and which words may not.

# As OpenAI has it: at this bias a token always comes, or never does.
MAX_BIAS = 100.0
MAX_BAD_WORDS = 256
MAX_WORD_LENGTH = 1000

_WORDS: dict[str, Any] = {
    "maxItems": MAX_BAD_WORDS,
    "items": {"type": "string", "minLength": 1, "maxLength": MAX_WORD_LENGTH},
}


def _biases(tokenizer: Tokenizer, biases: dict[str, float]) -> Iterable[tuple[int, float]]:
    if len(biases) > MAX_LOGIT_BIASES:
        message = f"logit_bias holds {len(biases)} tokens; at most {MAX_LOGIT_BIASES} are allowed."
        raise RequestError.bad_field("logit_bias", message)
    for token, bias in biases.items():
        place = f"logit_bias.{token[:100]}"
        if not (token.isascii() and token.isdigit()):
            raise RequestError.bad_field(place, f"{place} must be named by a token id.")
        if not math.isfinite(bias):
            raise RequestError.bad_field(place, f"{place} must be a finite number, not {bias}.")
        # vLLM takes a bias beyond the limits as one at the limit.
        yield checked_id(tokenizer, int(token[:20]), place), min(MAX_BIAS, max(-MAX_BIAS, bias))


def _allowed(tokenizer: Tokenizer, tokens: list[int]) -> tuple[int, ...]:
    if not tokens:
        raise RequestError.bad_field("allowed_token_ids", "allowed_token_ids is empty; allow at least one token.")
    checked = [checked_id(tokenizer, token, f"allowed_token_ids.{index}") for index, token in enumerate(tokens)]
    return tuple(sorted({*checked}))


def _spellings(tokenizer: Tokenizer, words: list[str]) -> Iterable[tuple[int, ...]]:
    """Each word as tokens, at the beginning of a text and behind a space, each spelling once."""
    if len(words) > MAX_BAD_WORDS:
        message = f"bad_words holds {len(words)} words; at most {MAX_BAD_WORDS} are allowed."
        raise RequestError.bad_field("bad_words", message)
    for index, word in enumerate(words):
        if not word.strip() or len(word) > MAX_WORD_LENGTH:
            place = f"bad_words.{index}"
            message = f"{place} must have 1 to {MAX_WORD_LENGTH} characters, and not only spaces."
            raise RequestError.bad_field(place, message)
    spelled = tokenizer.encode_each([text for word in words for text in (word.lstrip(), f" {word.lstrip()}")])
    # A tokenizer may make no token of a word that it does not know.
    return dict.fromkeys(tokens for tokens in spelled if tokens)


def checked_id(tokenizer: Tokenizer, token: int, place: str) -> int:
    """Raises RequestError for an id that no token has."""
    if not 0 <= token < tokenizer.vocab_size:
        message = f"{place} is the token id {token}; ids lie between 0 and {tokenizer.vocab_size - 1}."
        raise RequestError.bad_field(place, message)
    return token


# ── sampling ────────────────────────────────────────────────────────────────────────────────────────────────────────
# The sampling fields that OpenAI's and SGLang's routes share are turned into the engine's parameters.

MAX_CHOICES = 128
MAX_STOPS = 32
MAX_STOP_LENGTH = 1000
MAX_SIGMAS = 1000.0

# Empty strings are refused where they are read, with a better sentence than minLength gives.
Stop = Annotated[str, Field(json_schema_extra={"minLength": 1, "maxLength": MAX_STOP_LENGTH})]

_SAME_NAMES = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


class CommonSampling(Fields):
    """The fields that OpenAI's and SGLang's routes share: OpenAI's, and what vLLM's clients add."""

    # A bias by the token's id, which JSON writes as text.
    logit_bias: dict[str, float] | None = Field(default=None, json_schema_extra={"maxProperties": MAX_LOGIT_BIASES})
    allowed_token_ids: Annotated[list[Count], Field(fail_fast=True)] | None = None
    bad_words: Annotated[list[str], Field(fail_fast=True)] | None = Field(default=None, json_schema_extra=_WORDS)
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
        given = others | self._engine_fields(tokenizer.eos_ids) | self._token_params(tokenizer)
        self._check_least(given.get("min_new_tokens", 0), given["max_new_tokens"])
        try:
            return SamplingParams.from_fields(given)
        except RequestError as error:
            raise RequestError(self._with_client_name(error.fault)) from None

    def _token_params(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """The engine's parameters for these fields. Raises RequestError for an id that no token has."""
        params: dict[str, Any] = {}
        if self.logit_bias:
            params["logit_bias"] = tuple(_biases(tokenizer, self.logit_bias))
        if self.allowed_token_ids is not None:
            params["allowed_token_ids"] = _allowed(tokenizer, self.allowed_token_ids)
        if self.bad_words:
            params["bad_words"] = tuple(_spellings(tokenizer, self.bad_words))
        return params

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


# ── structured ──────────────────────────────────────────────────────────────────────────────────────────────────────
# The fields that OpenAI's and SGLang's routes share for answers of a given form, and how such fields are read.

# JSON, or a text that holds JSON. Read in `schema_in`, with better sentences than a union of types gives.
JsonOrText = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "boolean"}, {"type": "string"}, {"type": "null"}]})
]
# Some clients send every field they know, with an empty text for nothing.
_NOTHING: tuple[Any, ...] = (None, "")
# By the field's name in the body: what kind of form it asks for, and its value.
Forms = dict[str, tuple[str, Any]]


class FormFields(Fields):
    """SGLang's names. At most one of the fields of a body may say what the answer looks like."""

    json_schema: JsonOrText = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: JsonOrText = None

    def asked_forms(self) -> Forms:
        """What the client sent about the answer's form."""
        return sent(self, ("json_schema", "regex", "ebnf", "structural_tag"))

    def grammar(self) -> Grammar | None:
        """What the answer must look like. Raises RequestError if it is not clear, or cannot be kept."""
        asked = self.asked_forms()
        if len(asked) > 1:
            first, second, *_ = asked
            raise RequestError.bad_field(second, f"{first} and {second} both say what the answer looks like; send one.")
        return next((form(kind, value, param) for param, (kind, value) in asked.items()), None)


def sent(fields: Fields, names: Sequence[str], where: str = "") -> Forms:
    """Fields that were sent with a value."""
    return {where + name: (name, value) for name in names if (value := getattr(fields, name)) not in _NOTHING}


def form(kind: str, value: Any, param: str) -> Grammar | None:
    """The grammar that a field asks for."""
    match kind:
        case "json_schema" | "guided_json":
            return texts.json_schema(schema_in(value, param), param)
        case "json_object":
            return texts.json_object(param) if value else None
        case "regex" | "guided_regex":
            return texts.regex(value, param)
        case "choice" | "guided_choice":
            return texts.choice(value, param)
        case "ebnf" | "grammar" | "guided_grammar":
            return texts.ebnf(value, param)
        case "structural_tag":
            return tags_in(value, param)
    raise AssertionError(f"no field asks for {kind}")


def guided(params: SamplingParams, grammar: Grammar | None, eos_ids: frozenset[int]) -> SamplingParams:
    """The parameters of an answer that follows a grammar. Only an end token ends one that is complete."""
    if grammar is None:
        return params
    return replace(params, grammar=grammar, ignore_eos=False, stop_token_ids=params.stop_token_ids | eos_ids)


def placed(params: SamplingParams, place: str) -> SamplingParams:
    """The same parameters, whose grammar was asked for in an object of the body."""
    if params.grammar is None:
        return params
    return replace(params, grammar=replace(params.grammar, param=f"{place}.{params.grammar.param}"))


def schema_in(value: Any, param: str) -> Mapping[str, Any] | bool:
    """A schema, or a text that holds one."""
    schema = _parsed(value, param)
    if not isinstance(schema, dict | bool):
        raise RequestError.bad_field(param, f"{param} must be a JSON schema: an object, true or false.")
    return schema


def tags_in(value: Any, param: str) -> Grammar:
    """Free text that turns into JSON of a schema where it spells a trigger."""
    match _parsed(value, param):
        case {"structures": [_, *_] as structures, "triggers": [str(_), *_] as triggers}:
            tags = [_tag(one, triggers, f"{param}.structures.{index}") for index, one in enumerate(structures)]
            return texts.tagged(tags, param)
        case {"format": _}:
            message = f"{param}.format is not supported; send {param}.structures and {param}.triggers."
            raise RequestError.bad_field(f"{param}.format", message)
    message = f"{param} must be an object with 'structures' and 'triggers', both lists that are not empty."
    raise RequestError.bad_field(param, message)


def _tag(structure: Any, triggers: Sequence[Any], where: str) -> Tag:
    match structure:
        case {"begin": str(begin), "end": str(end)} if structure.keys() <= {"begin", "end", "schema"}:
            schema = schema_in(structure.get("schema", True), f"{where}.schema")
        case _:
            raise RequestError.bad_field(where, f"{where} must be an object with 'begin', 'schema' and 'end'.")
    for trigger in triggers:
        if isinstance(trigger, str) and trigger and begin.startswith(trigger):
            return Tag(begin=begin, schema=schema, end=end, trigger=trigger)
    raise RequestError.bad_field(f"{where}.begin", f"{where}.begin starts with none of the triggers.")


def _parsed(value: Any, param: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return from_json(value)
    except ValueError as error:
        raise RequestError.bad_field(param, f"{param} is not JSON: {error}.") from None
