"""Prompts come as text or as token ids, one or several, and become tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import Field, WithJsonSchema

from rota.core.errors import Fault, FaultCode, RequestError
from rota.server.front import Front
from rota.text.tokenizer import Tokenizer

Tokens = tuple[int, ...]
Result = TypeVar("Result")

# The most requests of one call: its prompts times the choices of each.
MAX_REQUESTS = 1024
# Up to this length a text is tokenized on the event loop, in at most 2 ms, because a thread would cost more. A longer
# text goes to a thread, so that other clients' tokens do not wait for it.
INLINE_CHARACTERS = 4096

_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TOKEN_LISTS = {"type": "array", "items": _TOKENS, "minItems": 1}

TokenList = Annotated[list[int], Field(fail_fast=True), WithJsonSchema(_TOKENS)]
# Checked in one pass by our code: pydantic would try every type on every item of a long list.
Prompt = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, _TEXTS, _TOKENS, _TOKEN_LISTS]})]


async def tokenized(front: Front, prompt: Any, param: str = "prompt") -> list[Tokens]:
    """Every prompt of a call as tokens. Raises RequestError for a value that is no prompt, or cannot fit."""
    prompts = _as_list(prompt, param)
    check_count(front, len(prompts), 1, param)
    places = params_of(prompt, param)
    characters = 0
    for place, one in zip(places, prompts, strict=True):
        if isinstance(one, str):
            refuse_too_long(front, len(one), place)
            characters += len(one)

    def encode(place: str, one: str | list[Any]) -> Tokens:
        tokens = front.tokenizer.encode(one) if isinstance(one, str) else checked_tokens(front.tokenizer, one, place)
        return not_empty(tokens, place)

    return await in_thread_if_long(characters, lambda: list(map(encode, places, prompts)))


def params_of(prompt: Any, param: str = "prompt") -> list[str]:
    """The field of each prompt. In a list, the field has the prompt's index."""
    match prompt:
        case [str() | list(), *_]:
            return [f"{param}.{index}" for index in range(len(prompt))]
    return [param]


def not_empty(tokens: Tokens, param: str) -> Tokens:
    """Raises RequestError for a prompt without tokens: there is nothing to continue."""
    if not tokens:
        raise RequestError.bad_field(param, f"{param} is empty; send at least one token.")
    return tokens


async def encoded(front: Front, text: str, add_special_tokens: bool = True) -> Tokens:
    """One text as tokens. Raises RequestError if it cannot fit."""
    refuse_too_long(front, len(text), "prompt")
    return await in_thread_if_long(len(text), lambda: front.tokenizer.encode(text, add_special_tokens))


async def rendered(front: Front, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> Tokens:
    """A conversation as tokens. Raises RequestError if the model's template refuses it."""
    characters = sum(len(text) for message in messages for text in message.values())
    refuse_too_long(front, characters, "messages")

    def render() -> Tokens:
        return front.tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)

    # A template adds some characters around every message.
    return await in_thread_if_long(characters + 16 * len(messages), render)


def check_count(front: Front, prompts: int, choices: int, param: str = "prompt", choices_param: str = "n") -> None:
    """Refuse a call that is larger than the queue: it could never be served, so a retry must not be suggested."""
    most, why = MAX_REQUESTS, ""
    if front.max_queued_requests is not None and front.max_queued_requests < most:
        most, why = front.max_queued_requests, ", as many as may wait here (--max-queued-requests)"
    if prompts * choices > most:
        word = param if prompts > 1 else choices_param
        message = f"{word} asks for {prompts * choices} answers in one call; ask for at most {most}{why}."
        raise RequestError.bad_field(word, message)


async def in_thread_if_long(characters: int, encode: Callable[[], Result]) -> Result:
    return encode() if characters <= INLINE_CHARACTERS else await asyncio.to_thread(encode)


def refuse_too_long(front: Front, characters: int, param: str) -> None:
    """Refuse a text that cannot fit even if all its tokens were the longest. Tokenizing it would waste memory."""
    capacity = front.service.state.capacity
    if capacity and characters > capacity.max_sequence_tokens * front.tokenizer.longest_token:
        message = (
            f"The prompt has {characters} characters, which cannot fit into the context of "
            f"{capacity.max_sequence_tokens} tokens."
        )
        raise RequestError(Fault(FaultCode.PROMPT_TOO_LONG, message, param))


def _as_list(prompt: Any, param: str) -> list[str] | list[list[Any]]:
    """The prompts as a list. One prompt becomes a list of one."""
    match prompt:
        case str():
            return [prompt]
        case []:
            raise RequestError.bad_field(param, f"{param} is an empty list; send at least one token or text.")
        case [int(), *_]:
            return [prompt]
        case [str() | list() as first, *_]:
            _check_alike(prompt, first, param)
            return prompt
    wanted = "must be a text, a list of texts, a list of token ids or a list of such lists"
    raise RequestError.bad_field(param, f"{param} {wanted}.")


def _check_alike(prompts: list[Any], first: str | list[Any], param: str) -> None:
    for index, one in enumerate(prompts):
        if type(one) is not type(first):
            wanted = "a text" if isinstance(first, str) else "a list of token ids"
            place = f"{param}.{index}"
            raise RequestError.bad_field(place, f"{place} must be {wanted}, as {param}.0 is.")


def checked_tokens(tokenizer: Tokenizer, tokens: list[Any], param: str) -> Tokens:
    """Raises RequestError for values that are no token ids."""
    most = tokenizer.vocab_size - 1
    for index, token in enumerate(tokens):
        if type(token) is not int:
            place = f"{param}.{index}"
            raise RequestError.bad_field(place, f"{place} must be a token id, as {param} is a list of them.")
        if not 0 <= token <= most:
            place = f"{param}.{index}"
            raise RequestError.bad_field(place, f"{place} is the token id {token}; ids lie between 0 and {most}.")
    return tuple(tokens)
