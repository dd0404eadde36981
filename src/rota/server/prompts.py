"""Prompts come as text or as token ids, one or many, and leave as tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import Field, WithJsonSchema

from rota.core.errors import Fault, FaultCode, RequestError
from rota.server.front import Front
from rota.text.tokenizer import Tokenizer

Tokens = tuple[int, ...]
Result = TypeVar("Result")

# A call may hold so many prompts, times the choices that each gets.
MAX_REQUESTS = 1024
# So many are tokenized where they stand, in 2 ms at most: a thread would cost more. A book takes longer than others
# should wait for their next token.
INLINE_CHARACTERS = 4096

_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TOKEN_LISTS = {"type": "array", "items": _TOKENS, "minItems": 1}

TokenList = Annotated[list[int], Field(fail_fast=True), WithJsonSchema(_TOKENS)]
# Checked by hand, in one pass: pydantic would try one kind after the other on every item of a long list.
Prompt = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, _TEXTS, _TOKENS, _TOKEN_LISTS]})]


async def tokenized(front: Front, prompt: Any, param: str = "prompt") -> list[Tokens]:
    """Every prompt of a call as tokens; raises RequestError for what is no prompt, or cannot fit."""
    prompts = _many(prompt, param)
    check_count(prompts, 1, param)
    texts = [one for one in prompts if isinstance(one, str)]
    for text in texts:
        refuse_hopeless(front, len(text), param)

    def encode_all() -> list[Tokens]:
        return [
            front.tokenizer.encode(one) if isinstance(one, str) else checked_tokens(front.tokenizer, one, param)
            for one in prompts
        ]

    return await off_the_loop_if_long(sum(map(len, texts)), encode_all)


async def encoded(front: Front, text: str, add_special_tokens: bool = True) -> Tokens:
    """One text as tokens; raises RequestError if it cannot fit."""
    refuse_hopeless(front, len(text), "prompt")
    return await off_the_loop_if_long(len(text), lambda: front.tokenizer.encode(text, add_special_tokens))


async def rendered(front: Front, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> Tokens:
    """A conversation as tokens; raises RequestError where the model's template does not take it."""
    characters = sum(len(text) for message in messages for text in message.values())
    refuse_hopeless(front, characters, "messages")

    def render() -> Tokens:
        return front.tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)

    # A template writes some characters of its own around every message.
    return await off_the_loop_if_long(characters + 16 * len(messages), render)


def check_count(prompts: Sequence[object], choices: int, param: str = "prompt") -> None:
    """A call may not fill the queue on its own."""
    if len(prompts) * choices > MAX_REQUESTS:
        message = f"{param} asks for {len(prompts) * choices} answers in one call; ask for at most {MAX_REQUESTS}."
        raise RequestError.bad_field(param, message)


async def off_the_loop_if_long(characters: int, encode: Callable[[], Result]) -> Result:
    return encode() if characters <= INLINE_CHARACTERS else await asyncio.to_thread(encode)


def refuse_hopeless(front: Front, characters: int, param: str) -> None:
    """A text that is too long even if all its tokens were the longest is not worth the memory of tokenizing it."""
    capacity = front.service.state.capacity
    if capacity and characters > capacity.max_sequence_tokens * front.tokenizer.longest_token:
        message = (
            f"The prompt has {characters} characters, which cannot fit into the context of "
            f"{capacity.max_sequence_tokens} tokens."
        )
        raise RequestError(Fault(FaultCode.PROMPT_TOO_LONG, message, param))


def _many(prompt: Any, param: str) -> list[str] | list[list[Any]]:
    """One prompt is a list of one."""
    match prompt:
        case str():
            return [prompt]
        case []:
            raise RequestError.bad_field(param, f"{param} is an empty list; send at least one token or text.")
        case [int(), *_]:
            return [prompt]
        case [str(), *_] if all(type(one) is str for one in prompt):
            return prompt
        case [list(), *_] if all(type(one) is list for one in prompt):
            return prompt
    wanted = "must be a text, a list of texts, a list of token ids or a list of such lists"
    raise RequestError.bad_field(param, f"{param} {wanted}.")


def checked_tokens(tokenizer: Tokenizer, tokens: list[Any], param: str) -> Tokens:
    """Raises RequestError for ids that are no tokens."""
    for token in tokens:
        if type(token) is not int:
            raise RequestError.bad_field(param, f"{param} mixes token ids with something else; send only ids.")
        if not 0 <= token < tokenizer.vocab_size:
            message = f"{param} holds the token id {token}; ids lie between 0 and {tokenizer.vocab_size - 1}."
            raise RequestError.bad_field(param, message)
    return tuple(tokens)
