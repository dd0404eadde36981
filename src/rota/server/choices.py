"""A choice turns one request's tokens into text until it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rota.core.errors import RequestError
from rota.core.events import FinishReason
from rota.core.moved import Moved
from rota.core.plan import TokenLogprobs
from rota.server.streams import Delta
from rota.text.stream import TextStream


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a delta adds to an answer. `finish_reason` is set in the last chunk."""

    text: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    # Log-probabilities of the prompt's tokens, from the second on: the first has none.
    scores: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    # Of a request with pooling, in its only chunk.
    embedding: tuple[float, ...] | None = None

    @property
    def has_news(self) -> bool:
        """False while text is held back, for example in the middle of a character."""
        return bool(self.text or self.logprobs or self.scores or self.finish_reason)


class Choice:
    """Counts and detokenizes the tokens of one answer, and notices its end."""

    def __init__(self, position: int, prompt_tokens: int, text: TextStream, has_output: bool = True) -> None:
        """Without output, its tokens are dropped: the client wants the prompt's scores alone."""
        self.position = position
        self.prompt_tokens = prompt_tokens
        self.output_tokens = 0
        self.cached_tokens = 0
        self.is_finished = False
        self.moves: list[Moved] = []  # from one version of its adapter to another
        self._text = text
        self._has_output = has_output

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._text.matched_stop

    def push(self, delta: Delta) -> Chunk:
        """Take a delta. Raises RequestError if the request failed. A stop string ends the choice early."""
        if not self.output_tokens:
            self.cached_tokens = delta.cached_tokens
        self.moves += delta.moves
        text = ""
        taken = 0
        is_stopped = False
        for token in delta.tokens if self._has_output else ():
            piece = self._text.push((token,))
            text += piece.text
            taken += 1
            if is_stopped := piece.is_stopped:
                break
        self.output_tokens += taken
        ending = delta.ending
        if ending and not is_stopped:
            if ending.fault:
                raise RequestError(ending.fault)
            piece = self._text.finish()
            text += piece.text
            is_stopped = piece.is_stopped
        self.is_finished = is_stopped or ending is not None
        reason = FinishReason.STOP.value if is_stopped else ending.reason.value if ending else None
        embedding = ending.embedding if ending else None
        return Chunk(text, delta.tokens[:taken], delta.logprobs[:taken], delta.scores, reason, embedding)


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """All chunks of one choice as one chunk."""
    return Chunk(
        "".join(chunk.text for chunk in chunks),
        [token for chunk in chunks for token in chunk.tokens],
        [entry for chunk in chunks for entry in chunk.logprobs],
        [entry for chunk in chunks for entry in chunk.scores],
        chunks[-1].finish_reason,
    )
