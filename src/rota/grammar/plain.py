"""A tokenizer of whole pieces of text, without tokens for single bytes, as the grammar library asks for it."""

from __future__ import annotations

import json
from collections.abc import Sequence

_SPECIAL = b""
_UNFORCED = {"name": "unforced", "lark_grammar": '%llguidance {"no_forcing": true}\nstart: @whole'}


class PlainTokenizer:
    """Its tokens; the texts of its grammars must be `unforced`."""

    # The library reads it by these names.
    bos_token_id = None

    def __init__(self, pieces: Sequence[bytes], vocabulary: int, eos_ids: Sequence[int]) -> None:
        """`pieces`: the bytes of each token; none: a special token. `vocabulary`: with the ids that are padding."""
        self.tokens = [*pieces, *[_SPECIAL] * (vocabulary - len(pieces))]
        self.eos_token_id = eos_ids[0]
        self.special_token_ids = [token for token, piece in enumerate(self.tokens) if piece == _SPECIAL]

    def __call__(self, _: bytes) -> list[int]:
        """The library asks how a text is spelled that a grammar forces. With `unforced` texts it never does."""
        return []


def unforced(text: str) -> str:
    """The text of a grammar that lets the model spell what is forced.

    The library would spell it at once, but here the beginning of a text may not be spelled alone: " h" of " he".
    """
    head, *others = json.loads(text)["grammars"]
    return json.dumps({"grammars": [_UNFORCED, {**head, "name": "whole"}, *others]})
