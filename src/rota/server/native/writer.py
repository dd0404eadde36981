"""SGLang's shape of an answer repeats the whole text so far in every event of a stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from pydantic import BaseModel, RootModel

from rota.core.events import FinishReason
from rota.core.plan import TokenLogprobs
from rota.server.answers.answer import Answer, Choice, Gathered
from rota.server.answers.respond import DataEvents, RotaBody, moves_field
from rota.server.native.call import GenerateCall
from rota.server.open_answers import name_of
from rota.server.streams import Delta

# ── bodies ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# The response bodies of SGLang's routes, for /docs.


class MetaInfo(BaseModel):
    id: str
    # {"type": "stop", "matched": …}, {"type": "length", "length": …} or {"type": "abort", "message": …}.
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float | None = None
    input_token_logprobs: list[Any] | None = None
    output_token_logprobs: list[Any] | None = None
    input_top_logprobs: list[Any] | None = None
    output_top_logprobs: list[Any] | None = None
    rota: RotaBody | None = None


class GeneratedBody(BaseModel):
    """One answer from its beginning. In a stream of several answers it has an index."""

    index: int | None = None
    text: str
    output_ids: list[int]
    meta_info: MetaInfo


class GenerateBody(RootModel[GeneratedBody | list[GeneratedBody]]):
    """One answer, or a list if the prompts came as a list or n is above 1."""


class ModelInfoBody(BaseModel):
    """Which model is served."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: bool = True
    context_length: int | None
    preferred_sampling_params: dict[str, Any] | None = None


class AbortedBody(BaseModel):
    """How many open calls were ended."""

    aborted: int


class HealthBody(BaseModel):
    """The server's state, with the reason if it is down."""

    status: str
    reason: str | None = None


# ── shape ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class GenerateWriter(DataEvents):
    """One object per choice. Several choices come as a list, or with an index in a stream."""

    def __init__(self, answer: Answer, call: GenerateCall) -> None:
        super().__init__(answer)
        self._call = call
        self._is_list = call.is_list or call.choices > 1
        self._pieces = answer.tokenizer.pieces
        self._so_far = [Gathered(choice.position) for choice in answer.choices]

    def event(self, delta: Delta) -> bytes:
        so_far = self._so_far[delta.position]
        so_far.add(delta)
        if not delta.has_news:
            return b""
        index = {"index": delta.position} if self._is_list else {}
        return msgspec.json.encode({**index, **self._object(so_far.whole)})

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        objects = [self._object(delta) for delta in deltas]
        return msgspec.json.encode(objects if self._is_list else objects[0])

    def _object(self, so_far: Delta) -> dict[str, Any]:
        choice, request = self.answer.choices[so_far.position], self.answer.requests[so_far.position]
        meta: dict[str, Any] = {
            "id": name_of(request),
            "finish_reason": _finish_reason(so_far, choice),
            "prompt_tokens": choice.prompt_tokens,
            "completion_tokens": choice.output_tokens,
            "cached_tokens": choice.cached_tokens,
            **moves_field([(choice.position, move) for move in choice.moves]),
        }
        if self._call.has_logprobs:
            scores = [] if request.sampling.prompt_logprobs is None else [None, *so_far.scores]
            meta |= self._logprobs("input", request.prompt[: len(scores)], scores)
            meta |= self._logprobs("output", so_far.tokens, so_far.logprobs)
        if so_far.finish_reason:
            meta["e2e_latency"] = time.monotonic() - request.arrived_at
        return {"text": so_far.said.content, "output_ids": so_far.tokens, "meta_info": meta}

    def _logprobs(
        self, side: str, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> dict[str, list[Any]]:
        """The log-probabilities of the "input" or "output" tokens. A prompt's first token has none."""
        chosen = [entry.chosen if entry else None for entry in logprobs]
        written: dict[str, list[Any]] = {f"{side}_token_logprobs": list(map(self._entry, chosen, tokens))}
        if self._call.has_top:
            written[f"{side}_top_logprobs"] = [
                [self._entry(value, token) for token, value in entry.top] if entry else None for entry in logprobs
            ]
        return written

    def _entry(self, value: float | None, token: int) -> tuple[float | None, int, str | None]:
        return value, token, self._pieces.name_of(token) if self._call.has_text else None


def _finish_reason(so_far: Delta, choice: Choice) -> dict[str, Any] | None:
    match so_far.finish_reason:
        case None:
            return None
        case FinishReason.LENGTH:
            return {"type": "length", "length": choice.output_tokens}
        case FinishReason.STOP:
            return {"type": "stop", "matched": choice.matched_stop or so_far.tokens[-1]}
    return {"type": "abort", "message": "The request was aborted."}
