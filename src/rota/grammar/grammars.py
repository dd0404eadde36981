"""Grammars become matchers, and matchers become masks over the vocabulary, on the library llguidance."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

from llguidance import LLExecutor, LLMatcher

from rota.core.grammar import Grammar, Matcher
from rota.grammar.vocabulary import WORD_BITS, Spelling, Vocabulary, explained
from rota.machine import usable_processors

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

    def __init__(self, read: Callable[[], Spelling], vocabulary: int, kept: int = KEPT) -> None:
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
