"""A choice is one answer in the making: tokens in, text out."""

from __future__ import annotations

from dataclasses import dataclass

from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.events import Finished, FinishReason
from rota.core.plan import TokenLogprobs
from rota.server.streams import Delta
from rota.text.stream import TextStream
from rota.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a delta adds to an answer; `finish_reason` is there once nothing follows."""

    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: str | None


class Choice:
    """Counts and detokenizes one answer, and notices its end."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self._text = TextStream(tokenizer, stop)
        self.output_tokens = 0
        self.cached_tokens = 0
        self.is_finished = False

    def push(self, delta: Delta) -> Chunk:
        """Take a delta in; raises RequestError if the request failed. Ends early at a stop string."""
        if not self.output_tokens:
            self.cached_tokens = delta.cached_tokens
        text = ""
        taken = 0
        is_stopped = False
        for token in delta.tokens:
            piece = self._text.push((token,))
            text += piece.text
            taken += 1
            if is_stopped := piece.is_stopped:
                break
        if not is_stopped and delta.ending:
            _raise_if_unanswered(delta.ending)
            piece = self._text.finish()
            text += piece.text
            is_stopped = piece.is_stopped
        self.output_tokens += taken
        self.is_finished = is_stopped or delta.ending is not None
        return Chunk(text, delta.tokens[:taken], delta.logprobs[:taken], _finish_reason(is_stopped, delta))


def joined(chunks: list[Chunk]) -> Chunk:
    """Chunks of one choice as one."""
    return Chunk(
        "".join(chunk.text for chunk in chunks),
        [token for chunk in chunks for token in chunk.tokens],
        [entry for chunk in chunks for entry in chunk.logprobs],
        chunks[-1].finish_reason,
    )


def _finish_reason(is_stopped: bool, delta: Delta) -> str | None:
    if is_stopped:
        return FinishReason.STOP.value
    return delta.ending.reason.value if delta.ending else None


def _raise_if_unanswered(ending: Finished) -> None:
    if ending.fault:
        raise RequestError(ending.fault)
    if ending.reason is FinishReason.ABORT:
        # Our own aborts are not listened to any more, so this one came from the other side.
        raise RequestError(Fault(FaultCode.ENGINE_DIED, "The server is stopping; this request was aborted."))
