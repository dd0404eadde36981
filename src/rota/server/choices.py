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


class Gathered:
    """The chunks of one choice, which become one chunk as they come.

    Kept apart they would be four objects a token for the garbage collector to visit. Beside long answers that are not
    streamed that is hundreds of thousands, and a collection would hold up the tokens of all clients.
    """

    __slots__ = ("_last", "_logprobs", "_scores", "_texts", "_tokens")

    def __init__(self, first: Chunk) -> None:
        self._texts = [first.text]
        self._tokens, self._logprobs, self._scores = [*first.tokens], [*first.logprobs], [*first.scores]
        self._last = first

    def add(self, chunk: Chunk) -> None:
        self._texts.append(chunk.text)
        self._tokens += chunk.tokens
        self._logprobs += chunk.logprobs
        self._scores += chunk.scores
        self._last = chunk

    @property
    def chunk(self) -> Chunk:
        reason, embedding = self._last.finish_reason, self._last.embedding
        return Chunk("".join(self._texts), self._tokens, self._logprobs, self._scores, reason, embedding)


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """All chunks of one choice as one chunk."""
    gathered = Gathered(chunks[0])
    for chunk in chunks[1:]:
        gathered.add(chunk)
    return gathered.chunk
