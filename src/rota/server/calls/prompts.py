"""Prompts come as text or as token ids, one or several, and become tokens."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from rota.core.errors import RequestError, prompt_too_long
from rota.server.calls.known_fields import UnknownFields
from rota.text.control_tokens import texts_in
from rota.text.speech import AS_THE_TEMPLATE_SAYS, ParserNames
from rota.text.tokenizer import Tokenizer

Tokens = tuple[int, ...]

# The most requests of one call: its prompts times the choices of each.
MAX_REQUESTS = 1024

_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
TOKEN_LISTS = {"type": "array", "items": TOKENS, "minItems": 1}

TokenList = Annotated[list[int], Field(fail_fast=True), WithJsonSchema(TOKENS)]
# Checked in one pass by our code: pydantic would try every type on every item of a long list.
Prompt = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, _TEXTS, TOKENS, TOKEN_LISTS]})]


@dataclass(frozen=True, slots=True)
class TextLimits:
    """What a text must fit. None: not known yet, or no limit."""

    max_sequence_tokens: int | None = None
    max_queued_requests: int | None = None


@dataclass(frozen=True, slots=True)
class CallPrompts:
    """The prompts of one call. `params` are their fields in the body; `texts` are theirs if they are echoed."""

    tokens: tuple[Tokens, ...]
    params: tuple[str, ...]
    texts: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Callable[..., CallPrompts], tuple[Any, ...]]:
        # Between processes, tokens travel as bytes: an object for each would take the event loop's time.
        return _unpacked, ([array("I", one).tobytes() for one in self.tokens], self.params, self.texts)


def _unpacked(packed: list[bytes], params: tuple[str, ...], texts: tuple[str, ...]) -> CallPrompts:
    return CallPrompts(tuple(tuple(memoryview(one).cast("I")) for one in packed), params, texts)


@dataclass(frozen=True, slots=True)
class PromptReading:
    """How a prompt is read: how many of its last tokens are kept, and whether special tokens stand around a text."""

    truncate_prompt_tokens: int | None = None
    output_tokens: int = 1  # for which room is left
    add_special_tokens: bool = True

    def kept(self, tokens: Tokens, context: int | None) -> Tokens:
        """The last tokens that are to be kept; -1: as many as the context holds."""
        match self.truncate_prompt_tokens:
            case None:
                return tokens
            case -1:
                return tokens if context is None else tokens[-max(1, context - min(self.output_tokens, context - 1)) :]
            case count if count > 0:
                return tokens[-count:]
        message = "truncate_prompt_tokens must be at least 1, or -1 for what the context holds."
        raise RequestError.bad_field("truncate_prompt_tokens", message)


AS_SENT = PromptReading()


@dataclass(frozen=True, slots=True)
class Texts:
    """Makes tokens of what a body holds. It works the same in the server's process and in the reading room."""

    tokenizer: Tokenizer
    limits: TextLimits = TextLimits()
    parsers: ParserNames = AS_THE_TEMPLATE_SAYS
    # What becomes of unknown fields; of one body alone, because it keeps the names of those that were ignored.
    unknown: UnknownFields = field(default_factory=UnknownFields)

    def tokenized(
        self, prompt: Any, param: str = "prompt", is_echoed: bool = False, reading: PromptReading = AS_SENT
    ) -> CallPrompts:
        """Every prompt of a call. Raises RequestError for a value that is no prompt, or cannot fit."""
        prompts = _as_list(prompt, param)
        self.check_count(len(prompts), 1, param)
        params = params_of(prompt, param)
        for place, one in zip(params, prompts, strict=True):
            if isinstance(one, str):
                self.refuse_too_long(len(one), place)
        read = [self._encode(place, one, reading) for place, one in zip(params, prompts, strict=True)]
        tokens = tuple(self.as_prompt(one, place, reading) for place, one in zip(params, read, strict=True))
        is_cut = [len(kept) < len(one) for kept, one in zip(tokens, read, strict=True)]
        texts = tuple(map(self._shown, prompts, tokens, is_cut)) if is_echoed else ()
        return CallPrompts(tokens, tuple(params), texts)

    def rendered(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        is_continued: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Tokens:
        """A conversation as tokens. Raises RequestError if the model's template refuses it."""
        self.refuse_too_long(sum(map(len, texts_in(messages))), "messages")
        self.refuse_too_long(sum(map(len, texts_in(tools))), "tools")
        return self.tokenizer.apply_chat_template(messages, tools, add_generation_prompt, variables, is_continued)

    def as_prompt(self, tokens: Tokens, param: str, reading: PromptReading = AS_SENT) -> Tokens:
        """The tokens that are kept. Raises RequestError for a prompt without tokens, or with too many."""
        if not tokens:
            raise RequestError.bad_field(param, f"{param} is empty; send at least one token.")
        most = self.limits.max_sequence_tokens
        tokens = reading.kept(tokens, most)
        if most is not None and len(tokens) >= most:
            raise RequestError(prompt_too_long(f"{len(tokens)} tokens > {most - 1} maximum", most, param))
        return tokens

    def check_count(self, prompts: int, choices: int, param: str = "prompt", choices_param: str = "n") -> None:
        """Refuse a call that is larger than the queue: it could never be served, so a retry must not be suggested."""
        most, why = MAX_REQUESTS, ""
        if self.limits.max_queued_requests is not None and self.limits.max_queued_requests < most:
            most, why = self.limits.max_queued_requests, ", as many as may wait here (--max-queued-requests)"
        if prompts * choices > most:
            word = param if prompts > 1 else choices_param
            message = f"{word} asks for {prompts * choices} answers in one call; ask for at most {most}{why}."
            raise RequestError.bad_field(word, message)

    def refuse_too_long(self, characters: int, param: str) -> None:
        """Refuse a text that cannot fit even if all its tokens were the longest. Tokenizing it would waste memory."""
        most = self.limits.max_sequence_tokens
        if most is not None and characters > most * self.tokenizer.longest_token:
            raise RequestError(prompt_too_long(f"its {characters} characters cannot fit", most, param))

    def _encode(self, place: str, one: str | list[Any], reading: PromptReading) -> Tokens:
        if isinstance(one, str):
            return self.tokenizer.encode(one, reading.add_special_tokens)
        return checked_tokens(self.tokenizer, one, place)

    def _shown(self, one: str | list[Any], tokens: Tokens, is_cut: bool) -> str:
        """A prompt sent as text comes back as the same text, unless it was cut."""
        return one if isinstance(one, str) and not is_cut else self.tokenizer.decode(tokens)


def params_of(prompt: Any, param: str = "prompt") -> list[str]:
    """The field of each prompt. In a list, the field has the prompt's index."""
    match prompt:
        case [str() | list(), *_]:
            return [f"{param}.{index}" for index in range(len(prompt))]
    return [param]


def _as_list(prompt: Any, param: str) -> list[str | list[Any]]:
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
