"""A guide says with which tokens a row's answer may go on; it must know the answer so far on the host.

A step begins before the tokens of the step before it are known. A guide is **behind** while a token of its answer is
not known yet: then only the draw waits for that token, and the forward pass does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from rota.core.errors import RotaError
from rota.core.grammar import Grammar, Grammars, Matcher
from rota.core.ids import Row
from rota.core.plan import Seat
from rota.engine.device import send
from rota.engine.sampling.masks import Masks, words_of

NO_GRAMMARS = "This engine was started without grammars, so it cannot follow one."
# A grammar that was never seen takes milliseconds, mostly outside Python's lock.
BUILDERS = 2


class Guide:
    """Of one answer, from its seat on."""

    def __init__(self, making: Future[Matcher]) -> None:
        self._making: Future[Matcher] | None = making  # until it is asked for
        self._matcher: Matcher | None = None
        self._failure = ""
        self.behind = 0  # tokens that are drawn, or will be, and not known yet

    @property
    def matcher(self) -> Matcher | None:
        """Waits until it is made; None if it could not be."""
        if self._making is not None:
            making, self._making = self._making, None
            if error := making.exception():
                self._failure = str(error) if isinstance(error, RotaError) else f"The grammar has failed: {error}"
            else:
                self._matcher = making.result()
        return self._matcher

    @property
    def fault(self) -> str:
        """Why the answer cannot go on, as a sentence; empty if it can."""
        return self._failure if self.matcher is None else self.matcher.fault

    def accept(self, token: int) -> None:
        """The answer's next token is known; a token below zero is none."""
        self.behind -= 1
        if token >= 0 and self.matcher is not None:
            self.matcher.accept((token,))


# The guides of a step, each with its row's position among those that sample.
Guided = tuple[tuple[int, Guide], ...]


@dataclass(frozen=True, slots=True)
class Guidance:
    """What the guides of a step say."""

    masks: Masks | None  # None if no row has one
    faults: tuple[tuple[int, str], ...]  # by position


class Guides:
    """The guides of all rows; most rows have none."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self._device = device
        self._words = words_of(vocabulary)
        self._grammars: Grammars | None = None
        self._builders = ThreadPoolExecutor(BUILDERS, "rota-grammar")  # threads start with the first grammar
        self._of_row: dict[Row, Guide] = {}

    def use(self, grammars: Grammars) -> None:
        self._grammars = grammars

    def seat(self, seats: Sequence[Seat]) -> None:
        """Who sits down has another guide than the row's last sequence, or none."""
        for seat in seats:
            if self._of_row:
                self._of_row.pop(seat.row, None)
            if seat.sampling.grammar is not None:
                answer = seat.tokens[seat.prompt_length :]
                self._of_row[seat.row] = Guide(self._builders.submit(self._matcher, seat.sampling.grammar, answer))

    def of(self, rows: Sequence[Row]) -> Guided:
        """The guides of a step, which is about to draw a token for each of these rows."""
        if not self._of_row:
            return ()
        return tuple((at, self._of_row[row]) for at, row in enumerate(rows) if row in self._of_row)

    def guidance(self, guided: Guided, rows: int) -> Guidance:
        """What may follow in a step of so many rows; no guide may be behind."""
        ready = [(at, guide.matcher) for at, guide in guided]
        wanted = [(at, matcher) for at, matcher in ready if matcher is not None]
        masks = self._masks(wanted, rows) if wanted else None
        # To work out a mask may find a fault.
        faults = ((at, guide.fault) for at, guide in guided)
        return Guidance(masks, tuple((at, fault) for at, fault in faults if fault))

    def close(self) -> None:
        self._builders.shutdown(wait=False, cancel_futures=True)

    def _masks(self, wanted: Sequence[tuple[int, Matcher]], rows: int) -> Masks:
        """One copy to the device: each row's line, or -1, and the lines behind them."""
        numbers = np.full(rows + len(wanted) * self._words, -1, np.int32)
        bits = numbers[rows:].reshape(len(wanted), self._words)
        for line, (at, _) in enumerate(wanted):
            numbers[at] = line
        assert self._grammars is not None
        self._grammars.fill([(matcher, line) for line, (_, matcher) in enumerate(wanted)], bits.data)
        sent = send(numbers, self._device)
        return Masks(sent[:rows], sent[rows:].view(len(wanted), self._words))

    def _matcher(self, grammar: Grammar, answer: Sequence[int]) -> Matcher:
        """A sequence that was preempted has an answer already."""
        if self._grammars is None:
            raise RotaError(NO_GRAMMARS)
        matcher = self._grammars.matcher(grammar)
        if answer:
            matcher.accept(answer)
        return matcher
