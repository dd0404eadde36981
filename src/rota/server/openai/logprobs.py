"""Log-probabilities are written in OpenAI's two shapes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rota.core.plan import TokenLogprobs
from rota.server.choices import Chunk
from rota.text.pieces import TokenPieces


@dataclass(frozen=True, slots=True)
class TokenNamer:
    """How log-probabilities name a token: by its text, or by its id, as vLLM writes it."""

    pieces: TokenPieces
    names_by_id: bool = False

    def __call__(self, token: int) -> str:
        return f"token_id:{token}" if self.names_by_id else self.pieces.name_of(token)


class CompletionLogprobs:
    """Four parallel lists per chunk. Offsets count through all chunks."""

    def __init__(self, namer: TokenNamer, echoed: Sequence[int] = (), shown: frozenset[int] = frozenset()) -> None:
        """`echoed`: the prompt's tokens, if the answer begins with them. `shown`: special tokens that have a text."""
        self._name = namer
        self._spelled = namer.pieces.showing(shown)
        self._echoed = iter(echoed)
        # The prompt's first token comes with the first chunk and has no score.
        self._unscored: list[None] = [None] * bool(echoed)
        self._offset = 0

    def shape(self, chunk: Chunk) -> dict[str, Any]:
        scores, self._unscored = [*self._unscored, *chunk.scores], []
        entries = [*scores, *chunk.logprobs]
        tokens = [*itertools.islice(self._echoed, len(scores)), *chunk.tokens]
        # An echo has no special tokens: it is the prompt as it was sent.
        lengths = [len(self._name.pieces[token].decode("utf-8", "replace")) for token in tokens[: len(scores)]]
        lengths += [len(self._spelled[token].decode("utf-8", "replace")) for token in chunk.tokens]
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


def chat_logprobs(namer: TokenNamer, chunk: Chunk) -> dict[str, Any]:
    """One object per token, with the token's bytes."""
    content = [
        _entry(namer, token, logprobs.chosen)
        | {"top_logprobs": [_entry(namer, other, value) for other, value in logprobs.top]}
        for token, logprobs in zip(chunk.tokens, chunk.logprobs, strict=True)
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
