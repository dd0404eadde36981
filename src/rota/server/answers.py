"""An answer is all that one call gets: a choice for every prompt and each of its `n`, in OpenAI's shape."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Any

from rota.core.adapter import Adapter
from rota.core.ids import RequestId
from rota.core.request import Request, SamplingParams
from rota.server.choices import Choice, Chunk, joined
from rota.server.fields import seeded
from rota.server.logprobs import CompletionLogprobs
from rota.server.streams import Delta, Reply
from rota.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Part:
    """A chunk and the position of the choice it belongs to."""

    position: int
    chunk: Chunk

    @property
    def has_news(self) -> bool:
        """False while text is held back, say in the middle of a character."""
        return bool(self.chunk.text or self.chunk.logprobs or self.chunk.finish_reason)


class CompletionAnswer:
    """Makes a call's requests, and its answer from what they give."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        model: Adapter,
        prompts: list[tuple[int, ...]],
        sampling: SamplingParams,
        choices_per_prompt: int,
    ) -> None:
        self._adapter_id = model.adapter_id
        self._prompts = prompts
        self._sampling = sampling
        self._choices_per_prompt = choices_per_prompt
        self._choices = [Choice(tokenizer, sampling.stop) for _ in range(len(prompts) * choices_per_prompt)]
        self._logprobs = [CompletionLogprobs(tokenizer) for _ in self._choices]
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
        }

    @property
    def is_finished(self) -> bool:
        return all(choice.is_finished for choice in self._choices)

    def requests(self) -> list[Request]:
        """One for each choice, in the order of their positions."""
        now = time.monotonic()
        return [
            Request(
                RequestId(f"{self._head['id']}-{prompt}-{choice}"),
                tokens,
                seeded(self._sampling, choice),
                now,
                self._adapter_id,
            )
            for prompt, tokens in enumerate(self._prompts)
            for choice in range(self._choices_per_prompt)
        ]

    def push(self, reply: Reply, deltas: dict[int, Delta]) -> list[Part]:
        """What the deltas add to the answer; ends requests whose choice is complete."""
        parts = []
        for position, delta in deltas.items():
            chunk = self._choices[position].push(delta)
            if chunk.finish_reason:
                reply.end(position)
            parts.append(Part(position, chunk))
        return parts

    def event(self, part: Part) -> dict[str, Any]:
        """One event of a stream."""
        return {**self._head, "choices": [self._choice(part.position, part.chunk)]}

    def usage_event(self) -> dict[str, Any]:
        """The last event of a stream that wants to know its usage."""
        return {**self._head, "choices": [], "usage": self._usage()}

    def whole(self, parts: list[Part]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        chunks: dict[int, list[Chunk]] = {}
        for part in parts:
            chunks.setdefault(part.position, []).append(part.chunk)
        choices = [self._choice(position, joined(chunks[position])) for position in sorted(chunks)]
        return {**self._head, "choices": choices, "usage": self._usage()}

    def _choice(self, position: int, chunk: Chunk) -> dict[str, Any]:
        has_logprobs = self._sampling.logprobs is not None
        return {
            "index": position,
            "text": chunk.text,
            "logprobs": self._logprobs[position].shape(chunk) if has_logprobs else None,
            "finish_reason": chunk.finish_reason,
        }

    def _usage(self) -> dict[str, Any]:
        """A prompt counts once, however many choices it has."""
        prompt_tokens = sum(map(len, self._prompts))
        output_tokens = sum(choice.output_tokens for choice in self._choices)
        cached_tokens = sum(choice.cached_tokens for choice in self._choices[:: self._choices_per_prompt])
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }
