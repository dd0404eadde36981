"""A completion grows token by token until its request ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from rota.core.events import Finished, FinishReason
from rota.core.plan import TokenLogprobs
from rota.text.stream import Piece, TextStream


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one prompt."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    # One per token, if the parameters asked for them.
    logprobs: tuple[TokenLogprobs, ...] = ()
    # One per token of the prompt, from its second token on, if the parameters asked for them.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(slots=True)
class PartialCompletion:
    """A completion whose request is still open."""

    stream: TextStream
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    scores: list[TokenLogprobs] = field(default_factory=list)
    is_stopped: bool = False
    ending: Finished | None = None

    def push(self, token: int, logprobs: TokenLogprobs | None) -> Piece:
        piece = self.stream.push((token,))
        self.text += piece.text
        self.is_stopped = piece.is_stopped
        self.tokens.append(token)
        if logprobs:
            self.logprobs.append(logprobs)
        return piece

    def completion(self) -> Completion:
        assert self.ending is not None, "the loop ends when every request has ended"
        last = self.stream.finish()
        is_stopped = self.is_stopped or last.is_stopped
        return Completion(
            self.text + last.text,
            tuple(self.tokens),
            FinishReason.STOP.value if is_stopped else self.ending.reason.value,
            self.ending.prompt_tokens,
            self.ending.cached_tokens,
            tuple(self.logprobs),
            tuple(self.scores),
        )
