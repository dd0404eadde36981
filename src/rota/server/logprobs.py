"""Log-probabilities in the shape of OpenAI's completions."""

from __future__ import annotations

from typing import Any

from rota.server.choices import Chunk
from rota.text.tokenizer import Tokenizer


class CompletionLogprobs:
    """Shapes one choice's log-probabilities, chunk after chunk; offsets count through all of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._pieces = tokenizer.pieces
        self._offset = 0

    def shape(self, chunk: Chunk) -> dict[str, Any]:
        texts = [self._text_of(token) for token in chunk.tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [entry.chosen for entry in chunk.logprobs],
            # From worst to best: where two tokens look alike the better one stays.
            "top_logprobs": [
                {self._text_of(token): value for token, value in reversed(entry.top)} for entry in chunk.logprobs
            ],
            "text_offset": offsets,
        }

    def _text_of(self, token: int) -> str:
        return self._pieces[token].decode("utf-8", "replace")
