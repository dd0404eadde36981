"""Log-probabilities in the two shapes that OpenAI gives them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from rota.server.choices import Chunk
from rota.text.pieces import TokenPieces


class CompletionLogprobs:
    """Four lists side by side, chunk after chunk; offsets count through all of them."""

    def __init__(self, pieces: TokenPieces, echoed: Sequence[int] = ()) -> None:
        """They begin with the prompt's tokens where these are echoed."""
        self._pieces = pieces
        self._echoed = iter(echoed)
        # A prompt's first token is told with the first chunk, and has no score.
        self._unscored: list[None] = [None] * bool(echoed)
        self._offset = 0

    def shape(self, chunk: Chunk) -> dict[str, Any]:
        scores, self._unscored = [*self._unscored, *chunk.scores], []
        entries = [*scores, *chunk.logprobs]
        tokens = [*itertools.islice(self._echoed, len(scores)), *chunk.tokens]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._pieces[token].decode("utf-8", "replace"))
        return {
            "tokens": [self._pieces.name_of(token) for token in tokens],
            "token_logprobs": [entry.chosen if entry else None for entry in entries],
            # From worst to best: where two tokens look alike the better one stays.
            "top_logprobs": [
                {self._pieces.name_of(token): value for token, value in reversed(entry.top)} if entry else None
                for entry in entries
            ],
            "text_offset": offsets,
        }


def chat_logprobs(pieces: TokenPieces, chunk: Chunk) -> dict[str, Any]:
    """An object a token, with the bytes it stands for."""
    content = [
        _entry(pieces, token, logprobs.chosen)
        | {"top_logprobs": [_entry(pieces, other, value) for other, value in logprobs.top]}
        for token, logprobs in zip(chunk.tokens, chunk.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _entry(pieces: TokenPieces, token: int, logprob: float) -> dict[str, Any]:
    return {"token": pieces.name_of(token), "logprob": logprob, "bytes": list(pieces[token])}
