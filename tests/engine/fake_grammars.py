"""Grammars made of arithmetic: what may come depends on every token before it, so a token lost or told twice shows."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch

from rota.core.errors import RequestError
from rota.core.grammar import Grammar, Matcher
from rota.engine.sampling.masks import Masks, packed, words_of
from tests.waiting import TIMEOUT_S


class FakeMatcher:
    """ "mod 7": the next token leaves the same remainder as the answer's sum and length together.

    "mod 7 then fault 4" has a fault behind four tokens; "mod 7 then end 4" allows only token 2 there.
    """

    def __init__(self, text: str) -> None:
        words = text.split()
        self._modulus = int(words[1])
        self._ending = (words[3], int(words[4])) if len(words) > 2 else ("", 0)
        self.answer: list[int] = []

    def accept(self, tokens: Sequence[int]) -> None:
        self.answer += tokens

    def is_at(self, kind: str, more: int = 0) -> bool:
        return self._ending[0] == kind and len(self.answer) >= self._ending[1] + more

    @property
    def fault(self) -> str:
        return "no token can follow four" if self.is_at("fault") else ""

    def allowed(self, vocabulary: int) -> list[int]:
        if self.is_at("fault") or self.is_at("end", 1):
            return list(range(vocabulary))
        if self.is_at("end"):
            return [2]
        return [token for token in range(vocabulary) if follows(self.answer, token, self._modulus)]


class FakeGrammars:
    """Makes fake matchers; "broken" cannot be made, and "held …" only once `release` was called."""

    def __init__(self, vocabulary: int = 256) -> None:
        self._vocabulary = vocabulary
        self._is_open = threading.Event()
        self.fills: list[int] = []  # how many rows each

    def release(self) -> None:
        self._is_open.set()

    def matcher(self, grammar: Grammar) -> FakeMatcher:
        if grammar.text == "broken":
            raise RequestError.bad_field(grammar.param, "The grammar is broken.")
        if grammar.text.startswith("held "):
            assert self._is_open.wait(TIMEOUT_S)
        return FakeMatcher(grammar.text.removeprefix("held "))

    def fill(self, wanted: Sequence[tuple[Matcher, int]], masks: memoryview) -> None:
        lines = np.asarray(masks)
        assert lines.shape[1] == words_of(self._vocabulary)
        self.fills.append(len(wanted))
        for matcher, line in wanted:
            assert isinstance(matcher, FakeMatcher)
            lines[line] = packed(matcher.allowed(self._vocabulary), self._vocabulary)


def follows(answer: Sequence[int], token: int, modulus: int) -> bool:
    return token % modulus == (sum(answer) + len(answer)) % modulus


def obeys(answer: Sequence[int], modulus: int) -> bool:
    return all(follows(answer[:at], token, modulus) for at, token in enumerate(answer))


def masks_of(allowed: Sequence[Sequence[int] | None], vocabulary: int) -> Masks:
    """Masks for rows of which some have none; lines lie the other way round than their rows."""
    given = [at for at, one in enumerate(allowed) if one is not None][::-1]
    lines = [given.index(at) if at in given else -1 for at in range(len(allowed))]
    bits = np.stack([packed(allowed[at] or (), vocabulary) for at in given])
    return Masks(torch.tensor(lines, dtype=torch.int32), torch.from_numpy(bits))
