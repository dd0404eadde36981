"""A model's tokens as the grammar library must know them: which bytes each stands for, and which end an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Protocol

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from rota.core.errors import ModelError
from rota.core.grammar import Grammar

# ── plain ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# A tokenizer of whole pieces of text, without tokens for single bytes, as the grammar library asks for it.

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


# What one mask may cost at most: some ten milliseconds on a slow core. A matcher that needs more has an error.
LIMITS = LLParserLimits(step_lexer_fuel=50_000, step_max_items=20_000, initial_lexer_fuel=250_000, verbose_errors=False)
MAX_ERROR = 300
# Rows of a mask are words of 32 bits.
WORD_BITS = 32


class Spelling(Protocol):
    """A tokenizer as the library must know it."""

    @property
    def saved(self) -> str:
        """The tokenizer's file, as `tokenizers` saves it."""
        ...

    @property
    def ids(self) -> int:
        """Token ids lie below it."""
        ...

    @property
    def pieces(self) -> Mapping[int, bytes]:
        """The bytes that each token stands for. Special tokens stand for none."""
        ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""
        ...


class Vocabulary:
    """The tokens of one model; made in about a second for 128,000 of them.

    Ids between the tokenizer's last and the model's `size` are padding, which no grammar allows.
    """

    def __init__(self, spelling: Spelling, size: int) -> None:
        ends = sorted(token for token in spelling.eos_ids if token < spelling.ids)
        if not ends:
            raise ModelError("The model's folder names no token that ends an answer, so none can follow a grammar.")
        if spelling.ids > size:
            message = f"The tokenizer has {spelling.ids:,} tokens, and the model only {size:,}."
            raise ModelError(f"{message} No answer can follow a grammar.")
        self.eos_ids = frozenset(ends)
        try:
            self._tokenizer, self._is_plain = LLTokenizer(spelling.saved, n_vocab=size, eos_token=ends), False
        except ValueError:  # its decoder is neither byte-level nor one with tokens for single bytes
            pieces = [spelling.pieces[token] for token in range(spelling.ids)]
            wrapper = TokenizerWrapper(PlainTokenizer(pieces, size, ends))
            self._tokenizer, self._is_plain = LLTokenizer(wrapper, eos_token=ends), True

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """At the beginning of an answer. A grammar that is wrong gives a matcher with an error."""
        text = unforced(grammar.text) if self._is_plain else grammar.text
        return LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS)


def explained(error: str) -> str:
    """The library's error as one line; empty if there is none."""
    first, *others = error.splitlines() or [""]
    if first.startswith("NoExtension"):
        return "no token of the model can follow"
    reasons = [line.removeprefix("error: ") for line in others if line.startswith("error: ")]
    found = " ".join([first, *reasons]).rstrip(".")[:MAX_ERROR]
    return f"the grammar is too complex ({found})" if "too many" in found.lower() else found
