"""The fields about single tokens: which are likelier, which alone may come, and which words may not."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import Field

from rota.core.errors import RequestError
from rota.core.request import MAX_LOGIT_BIASES
from rota.server.fields import Count, Fields
from rota.text.tokenizer import Tokenizer

# As OpenAI has it: at this bias a token always comes, or never does.
MAX_BIAS = 100.0
MAX_BAD_WORDS = 256
MAX_WORD_LENGTH = 1000

_WORDS: dict[str, Any] = {
    "maxItems": MAX_BAD_WORDS,
    "items": {"type": "string", "minLength": 1, "maxLength": MAX_WORD_LENGTH},
}


class TokenFields(Fields):
    """OpenAI's bias, and what vLLM's clients add."""

    # A bias by the token's id, which JSON writes as text.
    logit_bias: dict[str, float] | None = Field(default=None, json_schema_extra={"maxProperties": MAX_LOGIT_BIASES})
    allowed_token_ids: Annotated[list[Count], Field(fail_fast=True)] | None = None
    bad_words: Annotated[list[str], Field(fail_fast=True)] | None = Field(default=None, json_schema_extra=_WORDS)

    def token_params(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """The engine's parameters for these fields. Raises RequestError for an id that no token has."""
        params: dict[str, Any] = {}
        if self.logit_bias:
            params["logit_bias"] = tuple(_biases(tokenizer, self.logit_bias))
        if self.allowed_token_ids is not None:
            params["allowed_token_ids"] = _allowed(tokenizer, self.allowed_token_ids)
        if self.bad_words:
            params["bad_words"] = tuple(_spellings(tokenizer, self.bad_words))
        return params


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
