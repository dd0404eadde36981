"""A guide says with which tokens a row's answer may go on; it must know the answer so far on the host.

A step begins before the tokens of the step before it are known. A guide is **behind** while a token of its answer is
not known yet: then only the draw waits for that token, and the forward pass does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from rota.core.errors import RotaError
from rota.core.grammar import Grammar, Grammars, Matcher
from rota.core.ids import Row
from rota.core.plan import Seat
from rota.core.request import SamplingParams
from rota.engine.device import staging
from rota.engine.sampling.masks import BITS, Masks, Words, packed, words_of

# ── bad words ───────────────────────────────────────────────────────────────────────────────────────────────────────
# Bad words are token sequences that an answer must not hold: the last token of one may not follow the others.


class BadWords:
    """Words of several tokens, and the end of one answer. A word of a single token never comes, and needs no memory."""

    def __init__(self, words: Iterable[Sequence[int]], answer: Sequence[int]) -> None:
        self._endings: dict[tuple[int, ...], list[int]] = {}  # by the tokens before the last
        for word in words:
            if len(word) > 1:
                self._endings.setdefault(tuple(word[:-1]), []).append(word[-1])
        self._lengths = sorted({len(beginning) for beginning in self._endings})
        self._longest = max(self._lengths, default=0)
        self._last: tuple[int, ...] = ()
        for token in answer[-self._longest :]:
            self.accept(token)

    def accept(self, token: int) -> None:
        self._last = (*self._last, token)[-self._longest :]

    @property
    def forbidden(self) -> list[int]:
        """The tokens that would complete a word."""
        beginnings = (self._last[-length:] for length in self._lengths)
        return [token for beginning in beginnings for token in self._endings.get(beginning, ())]


def needs_memory(words: Iterable[Sequence[int]]) -> bool:
    return any(len(word) > 1 for word in words)


NO_GRAMMARS = "This engine was started without grammars, so it cannot follow one."
# A grammar that was never seen takes milliseconds, mostly outside Python's lock.
BUILDERS = 2
# Fewer than grammars remember, so what was prepared is made quickly.
MOST_PREPARED = 128


class Guide:
    """Of one answer, from its seat on."""

    def __init__(self, making: Future[Matcher] | None, words: BadWords | None, stops: Words, early: int) -> None:
        """`stops` are the tokens that may not be among the next `early` ones, unless only they may come."""
        self._making = making  # until it is asked for
        self._matcher: Matcher | None = None
        self._words = words
        self._stops = stops
        self._early = early
        self._failure = ""
        self.behind = 0  # tokens that are drawn, or will be, and not known yet

    @property
    def matcher(self) -> Matcher | None:
        """Waits until it is made; None if it could not be, and without a grammar."""
        if self._making is not None:
            making, self._making = self._making, None
            if error := making.exception():
                self._failure = str(error) if isinstance(error, RotaError) else _sentence(str(error))
            else:
                self._matcher = making.result()
        return self._matcher

    @property
    def fault(self) -> str:
        """Why the answer cannot go on, as a sentence; empty if it can."""
        if self.matcher is None:
            return self._failure
        return _sentence(self.matcher.fault) if self.matcher.fault else ""

    def accept(self, token: int) -> None:
        """The answer's next token is known; a token below zero is none."""
        self.behind -= 1
        self._early -= 1
        if token < 0:
            return
        if self.matcher is not None:
            self.matcher.accept((token,))
        if self._words is not None:
            self._words.accept(token)

    def restrict(self, bits: Words) -> None:
        """Take from a mask what the grammar does not know of."""
        if self._words is not None and (forbidden := self._words.forbidden):
            bits &= ~packed(forbidden, len(bits) * BITS)
        if self._early > 0:
            later = bits & ~self._stops
            if later.any():  # else the grammar is complete: the answer ends, however short it is
                bits[:] = later


# The guides of a step, each with its row's position among those that sample.
Guided = tuple[tuple[int, Guide], ...]


# Why answers cannot go on, by position.
Faults = tuple[tuple[int, str], ...]


class Guides:
    """The guides of all rows; most rows have none."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self._device = device
        self._words = words_of(vocabulary)
        self._grammars: Grammars | None = None
        self._builders = ThreadPoolExecutor(BUILDERS, "rota-grammar")  # threads start with the first grammar
        self._of_row: dict[Row, Guide] = {}
        self._preparers = ThreadPoolExecutor(BUILDERS, "rota-grammar-preparer")
        self._preparations: dict[str, Future[None]] = {}  # by text, the last ones

    def use(self, grammars: Grammars) -> None:
        self._grammars = grammars

    def prepare(self, grammar: Grammar, then: Callable[[], None]) -> bool:
        """True: `then` is called once matchers are made quickly, from any thread. False: they are already."""
        if self._grammars is None:
            return False
        if grammar.text not in self._preparations:
            # In threads of their own: matchers of rows do not wait for them.
            self._preparations[grammar.text] = self._preparers.submit(self._try, grammar)
            if len(self._preparations) > MOST_PREPARED:
                del self._preparations[next(iter(self._preparations))]
        preparation = self._preparations[grammar.text]
        if preparation.done():
            return False
        preparation.add_done_callback(lambda done: None if done.cancelled() else then())
        return True

    def seat(self, seats: Sequence[Seat]) -> None:
        """Who sits down has another guide than the row's last sequence, or none."""
        for seat in seats:
            if self._of_row:
                self._of_row.pop(seat.row, None)
            if needs_guide(seat.sampling):
                self._of_row[seat.row] = self._guide(seat.sampling, seat.tokens[seat.prompt_length :])

    def of(self, rows: Sequence[Row]) -> Guided:
        """The guides of a step, which is about to draw a token for each of these rows."""
        if not self._of_row:
            return ()
        return tuple((at, self._of_row[row]) for at, row in enumerate(rows) if row in self._of_row)

    def guidance(self, guided: Guided, rows: int) -> tuple[Masks | None, Faults]:
        """What may follow in a step of so many rows; no guide may be behind. None if no row has a mask."""
        wanted = [(at, guide) for at, guide in guided if guide.matcher is not None or not guide.fault]
        masks = self._masks(wanted, rows) if wanted else None
        # To work out a mask may find a fault.
        faults = ((at, guide.fault) for at, guide in guided)
        return masks, tuple((at, fault) for at, fault in faults if fault)

    def close(self) -> None:
        self._builders.shutdown(wait=False, cancel_futures=True)
        self._preparers.shutdown(wait=False, cancel_futures=True)

    def _masks(self, wanted: Sequence[tuple[int, Guide]], rows: int) -> Masks:
        """One copy to the device: each row's line, or -1, and the lines behind them."""
        staged = staging(rows + len(wanted) * self._words, self._device)
        numbers = staged.numpy()
        numbers.fill(-1)
        numbers[[at for at, _ in wanted]] = np.arange(len(wanted))
        bits = numbers[rows:].reshape(len(wanted), self._words)
        guides = [guide for _, guide in wanted]
        matchers = [(guide.matcher, line) for line, guide in enumerate(guides) if guide.matcher is not None]
        if matchers:
            assert self._grammars is not None
            self._grammars.fill(matchers, bits.data)
        for line, guide in enumerate(guides):
            guide.restrict(bits[line])
        sent = staged.to(self._device, non_blocking=True)
        return Masks(sent[:rows], sent[rows:].view(len(wanted), self._words))

    def _guide(self, params: SamplingParams, answer: Sequence[int]) -> Guide:
        making = self._builders.submit(self._matcher, params.grammar, answer) if params.grammar is not None else None
        words = BadWords(params.bad_words, answer) if needs_memory(params.bad_words) else None
        # Without a grammar the device itself holds stop tokens back.
        early = params.min_new_tokens - len(answer) if params.grammar is not None else 0
        stops = packed(params.stop_token_ids if early > 0 else (), self._words * BITS)
        return Guide(making, words, stops, early)

    def _try(self, grammar: Grammar) -> None:
        assert self._grammars is not None
        self._grammars.matcher(grammar)

    def _matcher(self, grammar: Grammar, answer: Sequence[int]) -> Matcher:
        """A sequence that was preempted has an answer already."""
        if self._grammars is None:
            raise RotaError(NO_GRAMMARS)
        matcher = self._grammars.matcher(grammar)
        if answer:
            matcher.accept(answer)
        return matcher


def _sentence(fault: str) -> str:
    return f"The answer cannot follow its grammar: {fault.rstrip('.')}."


def needs_guide(params: SamplingParams) -> bool:
    return params.grammar is not None or needs_memory(params.bad_words)
