"""A detokenizer turns tokens into text as they come, and never gives half a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from rota.text.pieces import TokenPieces


class Detokenizer:
    """The text of one sequence, piece by piece. All pieces, then `finish()`, are the text of its tokens.

    Bytes that may still become a character are held back. Bytes that cannot become one are U+FFFD at once.
    """

    def __init__(self, pieces: TokenPieces, is_continuation: bool = False, shown: frozenset[int] = frozenset()) -> None:
        """`is_continuation`: the text follows other text, so it keeps a space at its beginning.

        `shown`: special tokens that have a text all the same.
        """
        self._pieces = pieces.showing(shown)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._leading_spaces = 0 if is_continuation else pieces.leading_spaces

    def push(self, tokens: Iterable[int]) -> str:
        """The text that these tokens complete."""
        pieces = self._pieces
        return self._trim(self._decoder.decode(b"".join([pieces[token] for token in tokens])))

    def finish(self) -> str:
        """The text that was held back: U+FFFD where the tokens end inside a character."""
        return self._trim(self._decoder.decode(b"", final=True))

    def _trim(self, text: str) -> str:
        while self._leading_spaces and text:
            if text[0] == " ":
                self._leading_spaces -= 1
                text = text[1:]
            else:
                self._leading_spaces = 0
        return text
