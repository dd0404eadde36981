"""Log-probabilities are written in OpenAI's two shapes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from rota.server.choices import Chunk
from rota.text.pieces import TokenPieces


class CompletionLogprobs:
    """Four parallel lists per chunk. Offsets count through all chunks."""

    def __init__(self, pieces: TokenPieces, echoed: Sequence[int] = ()) -> None:
        """`echoed`: the prompt's tokens, if the answer begins with them."""
        self._pieces = pieces
        self._echoed = iter(echoed)
        # The prompt's first token comes with the first chunk and has no score.
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
            # From worst to best: if two tokens have the same text, the better one stays.
            "top_logprobs": [
                {self._pieces.name_of(token): value for token, value in reversed(entry.top)} if entry else None
                for entry in entries
            ],
            "text_offset": offsets,
        }


def chat_logprobs(pieces: TokenPieces, chunk: Chunk) -> dict[str, Any]:
    """One object per token, with the token's bytes."""
    content = [
        _entry(pieces, token, logprobs.chosen)
        | {"top_logprobs": [_entry(pieces, other, value) for other, value in logprobs.top]}
        for token, logprobs in zip(chunk.tokens, chunk.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _entry(pieces: TokenPieces, token: int, logprob: float) -> dict[str, Any]:
    return {"token": pieces.name_of(token), "logprob": logprob, "bytes": list(pieces[token])}
