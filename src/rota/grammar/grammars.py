"""Grammars become matchers, and matchers become masks over the vocabulary, on the library llguidance."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from rota.core.errors import ModelError
from rota.core.grammar import Grammar, Matcher
from rota.machine import usable_processors
from rota.text.tokenizer import Tokenizer

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


# ── vocabulary ──────────────────────────────────────────────────────────────────────────────────────────────────────
# A model's tokens as the grammar library must know them: which bytes each stands for, and which end an answer.

# What one mask may cost at most: some ten milliseconds on a slow core. A matcher that needs more has an error.
LIMITS = LLParserLimits(step_lexer_fuel=50_000, step_max_items=20_000, initial_lexer_fuel=250_000, verbose_errors=False)
MAX_ERROR = 300
# Rows of a mask are words of 32 bits.
WORD_BITS = 32


class Vocabulary:
    """The tokens of one model; made in about a second for 128,000 of them.

    Ids between the tokenizer's last and the model's `size` are padding, which no grammar allows.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        ends = sorted(token for token in tokenizer.eos_ids if token < tokenizer.ids)
        if not ends:
            raise ModelError("The model's folder names no token that ends an answer, so none can follow a grammar.")
        if tokenizer.ids > size:
            message = f"The tokenizer has {tokenizer.ids:,} tokens, and the model only {size:,}."
            raise ModelError(f"{message} No answer can follow a grammar.")
        self.eos_ids = frozenset(ends)
        try:
            self._tokenizer, self._is_plain = LLTokenizer(tokenizer.saved, n_vocab=size, eos_token=ends), False
        except ValueError:  # its decoder is neither byte-level nor one with tokens for single bytes
            pieces = [tokenizer.pieces[token] for token in range(tokenizer.ids)]
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


# ── matchers ────────────────────────────────────────────────────────────────────────────────────────────────────────
# A matcher follows one answer; the masks of a step's matchers are computed together.

# Grammars whose first state is kept, so that the next request with one copies it instead of reading the text.
KEPT = 256
# Masks of a step are computed at the same time. More threads would take cores from others.
MAX_THREADS = 8
_ALL_BITS = 0xFF


class LlMatcher:
    """Where one answer stands. A token that ends answers is its last."""

    def __init__(self, library: LLMatcher, eos_ids: frozenset[int]) -> None:
        self.library = library
        self._eos_ids = eos_ids
        self._has_ended = False

    def accept(self, tokens: Sequence[int]) -> None:
        """The answer goes on with these tokens. Tokens behind its end change nothing."""
        for token in tokens:
            if self.is_over:
                return
            if token in self._eos_ids:
                self._has_ended = True
            else:
                self.library.consume_token(token)

    @property
    def is_over(self) -> bool:
        """Whether the answer has ended, or cannot go on."""
        return self._has_ended or self.library.is_error()

    @property
    def fault(self) -> str:
        """Why no token can follow, though the answer is not complete; empty if all is well."""
        return "" if self._has_ended or not self.library.is_error() else explained(self.library.get_error())


class LlGrammars:
    """Makes matchers for one vocabulary, from any thread. The tokenizer is read in a thread of its own meanwhile."""

    def __init__(self, read: Callable[[], Tokenizer], vocabulary: int, kept: int = KEPT) -> None:
        """`read` reads the model's tokenizer, which may take a second."""
        self._size = vocabulary
        # A call of `matcher` raises its error. An engine without a vocabulary serves all other requests.
        reader = ThreadPoolExecutor(1, "rota-grammars")
        self._vocabulary = read_vocabulary = reader.submit(lambda: Vocabulary(read(), vocabulary))
        reader.shutdown(wait=False)
        self._executor = LLExecutor(min(MAX_THREADS, max(1, usable_processors() // 2)))
        self._pristine = lru_cache(kept)(lambda grammar: read_vocabulary.result().matcher(grammar))

    def matcher(self, grammar: Grammar) -> LlMatcher:
        """At the beginning of an answer. A grammar that was never seen takes milliseconds."""
        return LlMatcher(self._pristine(grammar).deep_copy(), self._vocabulary.result().eos_ids)

    def fill(self, wanted: Sequence[tuple[Matcher, int]], masks: memoryview) -> None:
        """Write each matcher's mask into its line of `masks`. A matcher that is over allows every token."""
        lines, words = masks.shape or (0, 0)
        assert words == -(-self._size // WORD_BITS), "a line has a bit for every token"
        whole = (ctypes.c_char * masks.nbytes).from_buffer(masks)
        line_bytes = masks.nbytes // max(lines, 1)
        running = []
        for matcher, line in wanted:
            assert isinstance(matcher, LlMatcher), "another maker's matchers have another form"
            if matcher.is_over:
                ctypes.memset(ctypes.addressof(whole) + line * line_bytes, _ALL_BITS, line_bytes)
            else:
                running.append((matcher.library, line))
        if running:
            self._executor.unsafe_compute_mask_ptr(running, ctypes.addressof(whole), line_bytes, lines)
