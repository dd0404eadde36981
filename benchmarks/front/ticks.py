"""Ticks are the moments at which the paced device gives tokens, and every token says in which tick it was made."""

from __future__ import annotations

import re

from rota.text.tokenizer import Tokenizer

CYCLE = 1000  # ticks until words repeat: ten seconds at a hundred a second
WORD = re.compile(" [a-z]{2,}")


def tick_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens that are a word each, by their tick's place in the cycle."""
    found = (token for token in range(tokenizer.vocab_size) if WORD.fullmatch(tokenizer.decode((token,))))
    return tuple(token for token, _ in zip(found, range(CYCLE), strict=False))


class TickReader:
    """Tells when a word was made: its tick is the last one with its place in the cycle."""

    def __init__(self, tokenizer: Tokenizer, step_s: float) -> None:
        self._places = {tokenizer.decode((token,)).strip(): place for place, token in enumerate(tick_tokens(tokenizer))}
        self._step_s = step_s

    def age_s(self, word: str, at: float) -> float:
        """How long before `at` it was made, up to a cycle."""
        last = int(at / self._step_s)
        tick = last - (last - self._places[word]) % CYCLE
        return at - tick * self._step_s
