"""The answers of OpenAI's two routes: head, choices, log-probabilities and usage, and their models for /docs."""

from __future__ import annotations

import itertools
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from pydantic import BaseModel

from rota.core.plan import TokenLogprobs
from rota.server.answers.answer import Answer
from rota.server.answers.respond import DataEvents, RotaBody, moves_field
from rota.server.calls.prompts import Tokens
from rota.server.openai.sampling_fields import OpenAiCall
from rota.server.streams import Delta
from rota.text.pieces import TokenPieces

# ── bodies ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# The response bodies of OpenAI's routes, for /docs; the routes encode them by hand for speed.


class CachedTokens(BaseModel):
    cached_tokens: int


class UsageBody(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class CompletionBody(BaseModel):
    """The continuations, or a part of them in a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | None = None
    rota: RotaBody | None = None


class FunctionCallBody(BaseModel):
    """A function and its arguments, as a text of JSON."""

    name: str
    arguments: str


class ToolCallBody(BaseModel):
    id: str
    type: Literal["function"]
    function: FunctionCallBody


class ChatMessageBody(BaseModel):
    """The content is null if the message only calls. Thoughts have two names, for different clients."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallBody] | None = None
    function_call: FunctionCallBody | None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessageBody
    logprobs: dict[str, Any] | None
    finish_reason: str
    token_ids: list[int] | None = None


class ChatBody(BaseModel):
    """The next message of a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    rota: RotaBody | None = None


class FunctionCallDelta(BaseModel):
    name: str | None = None
    arguments: str


class ToolCallDelta(BaseModel):
    """A piece of a call. Its first piece has id, type and name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCallDelta


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    function_call: FunctionCallDelta | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    token_ids: list[int] | None = None


class ChatChunkBody(BaseModel):
    """A part of the next message of a conversation."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | None = None
    prompt_token_ids: list[int] | None = None
    rota: RotaBody | None = None


# ── logprobs ────────────────────────────────────────────────────────────────────────────────────────────────────────
# Log-probabilities are written in OpenAI's two shapes.


@dataclass(frozen=True, slots=True)
class TokenNamer:
    """How log-probabilities name a token: by its text, or by its id, as vLLM writes it."""

    pieces: TokenPieces
    names_by_id: bool = False

    def __call__(self, token: int) -> str:
        return f"token_id:{token}" if self.names_by_id else self.pieces.name_of(token)


class CompletionLogprobs:
    """Four parallel lists per delta. Offsets count through all deltas."""

    def __init__(self, namer: TokenNamer, echoed: Sequence[int] = (), shown: frozenset[int] = frozenset()) -> None:
        """`echoed`: the prompt's tokens, if the answer begins with them. `shown`: special tokens that have a text."""
        self._name = namer
        self._spelled = namer.pieces.showing(shown)
        self._echoed = iter(echoed)
        # The prompt's first token comes with the first delta and has no score.
        self._unscored: list[None] = [None] * bool(echoed)
        self._offset = 0

    def shape(self, delta: Delta) -> dict[str, Any]:
        scores, self._unscored = [*self._unscored, *delta.scores], []
        entries = [*scores, *delta.logprobs]
        tokens = [*itertools.islice(self._echoed, len(scores)), *delta.tokens]
        # An echo has no special tokens: it is the prompt as it was sent.
        lengths = [len(self._name.pieces[token].decode("utf-8", "replace")) for token in tokens[: len(scores)]]
        lengths += [len(self._spelled[token].decode("utf-8", "replace")) for token in delta.tokens]
        offsets = list(itertools.accumulate(lengths, initial=self._offset))
        self._offset = offsets.pop()
        return {
            "tokens": [self._name(token) for token in tokens],
            "token_logprobs": [entry.chosen if entry else None for entry in entries],
            # From worst to best: if two tokens have the same text, the better one stays.
            "top_logprobs": [
                {self._name(token): value for token, value in reversed(entry.top)} if entry else None
                for entry in entries
            ],
            "text_offset": offsets,
        }


def chat_logprobs(namer: TokenNamer, delta: Delta) -> dict[str, Any]:
    """One object per token, with the token's bytes."""
    content = [
        _entry(namer, token, logprobs.chosen)
        | {"top_logprobs": [_entry(namer, other, value) for other, value in logprobs.top]}
        for token, logprobs in zip(delta.tokens, delta.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _entry(namer: TokenNamer, token: int, logprob: float) -> dict[str, Any]:
    return {"token": namer(token), "logprob": logprob, "bytes": list(namer.pieces[token])}


def prompt_logprobs(
    pieces: TokenPieces, prompt: Sequence[int], scores: Sequence[TokenLogprobs]
) -> list[dict[str, Any] | None]:
    """vLLM's shape: for each token of the prompt its own entry and the likeliest ones, by id. The first has none."""
    return [None, *(_ranked(pieces, token, one) for token, one in zip(prompt[1:], scores, strict=True))]


def _ranked(pieces: TokenPieces, token: int, logprobs: TokenLogprobs) -> dict[str, Any]:
    """The rank of a token that is not among the likeliest is not known."""
    ranks = {other: rank for rank, (other, _) in enumerate(logprobs.top, start=1)}
    values = {token: logprobs.chosen, **dict(logprobs.top)}
    return {
        str(one): {"logprob": value, "rank": ranks.get(one), "decoded_token": pieces.name_of(one)}
        for one, value in values.items()
    }


# ── shape ───────────────────────────────────────────────────────────────────────────────────────────────────────────

_encode = msgspec.json.Encoder().encode


class OpenAiWriter(DataEvents):
    """Subclasses write a choice, in a stream and as a whole."""

    event_kind: str
    whole_kind: str

    def __init__(self, answer: Answer, call: OpenAiCall, prompt: Tokens | None = None) -> None:
        """`prompt`: its tokens, if the client wants them beside those of the answer."""
        super().__init__(answer)
        self.namer = TokenNamer(answer.tokenizer.pieces, call.names_by_id)
        self._options = call.options
        created = int(time.time())
        self._head = {"id": answer.answer_id, "object": self.whole_kind, "created": created, "model": answer.model}
        # vLLM's field, in the first event of a stream.
        self._untold = {} if prompt is None else {"prompt_token_ids": prompt}
        # The head of a stream's events is always the same, so it is encoded once.
        self._event_head = _encode(self._head | {"object": self.event_kind})[:-1] + b',"choices":['
        # If the last event has the usage, all other events have the field too. Some clients of OpenAI need that.
        self._event_tail = b'],"usage":null' if call.options.include_usage else b"]"

    @abstractmethod
    def piece(self, delta: Delta) -> dict[str, Any] | None:
        """A choice in an event of a stream. None: there is nothing to send yet."""

    @abstractmethod
    def complete(self, delta: Delta) -> dict[str, Any]:
        """A choice in an answer that is not streamed."""

    def event(self, delta: Delta) -> bytes:
        if (choice := self.piece(delta)) is None:
            return b""
        piece = _encode(choice)
        tail = self._event_tail
        if self._options.continuous_usage_stats:
            tail = b'],"usage":' + _encode(self._usage())
        if self._untold:
            tail += b"," + _encode(self._untold)[1:-1]
            self._untold = {}
        return self._event_head + piece + tail + b"}"

    def last_event(self) -> bytes:
        told = {"usage": self._usage()} if self._options.include_usage else {}
        told |= moves_field(self.answer.moves)
        return self._event_head + b"]," + _encode(told)[1:] if told else b""

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        choices = [self.complete(delta) for delta in deltas]
        more = {**self._untold, **self.about_prompt(deltas[0]), **moves_field(self.answer.moves)}
        return _encode({**self._head, "choices": choices, "usage": self._usage(), **more})

    def about_prompt(self, _first: Delta) -> dict[str, Any]:
        """More about the prompt, for the end of an answer that is not streamed. `_first`: the first choice."""
        return {}

    def _usage(self) -> dict[str, Any]:
        usage = self.answer.usage
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.output_tokens,
            "total_tokens": usage.prompt_tokens + usage.output_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        }
