"""A drawing gives a computed step its tokens: at once, or, if a guide is behind, once the step before is known.

        device   | forward 1 | draw 1 | forward 2 |      | draw 2 | forward 3 |
        here     begin 1   begin 2     end 1: token 1 is known, mask 2, draw 2    begin 3

The forward pass of step 2 runs while the host works out its masks. Steps without a guide are drawn as they begin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rota.core.ids import Row
from rota.core.plan import NO_CHOICE, NO_TOKEN, Seat, StepPlan, StepResult
from rota.engine.device import send
from rota.engine.families.decoder import Decoder
from rota.engine.parallel.group import RankGroup
from rota.engine.sampling.guides import Faults, Guided, Guides
from rota.engine.sampling.masks import Masks
from rota.engine.sampling.sampler import Sampler, logprobs_of
from rota.engine.sampling.vocabulary import RankVocabulary
from rota.engine.step.device_step import LoraBatch
from rota.engine.step.frames import StepFrame
from rota.engine.step.inputs import Rows
from rota.engine.step.results import Computed, Logprobs, Sampled

NO_TOKENS = Sampled(torch.empty(0, dtype=torch.int64))


class Ticket:
    """Stands for a step under way; its results are on their way to the host once it is drawn."""

    def __init__(self, guided: Guided = ()) -> None:
        self.guided = guided
        self.began_at = self.host_s = 0.0  # when its submission began, and what the host took for that
        self._sampled: Sampled | None = None  # on the host
        self._is_there: torch.Event | None = None  # None: from the start
        self._faults: Faults = ()

    def complete(self, sampled: Sampled, device: torch.device, faults: Faults = ()) -> None:
        """The step is drawn; rows with a fault get no token."""
        self._sampled, self._faults = sampled.on_host(), faults
        if device.type == "cuda":
            self._is_there = torch.Event(device)
            self._is_there.record()

    def wait(self) -> StepResult:
        """Blocks until the step is done, and for no step after it."""
        assert self._sampled is not None, "steps are collected in their order, so this one is drawn"
        if self._is_there is not None:
            self._is_there.synchronize()
        result = self._sampled.as_result()
        if not self._faults:
            return result
        failed = dict(self._faults)
        tokens = tuple(NO_TOKEN if at in failed else token for at, token in enumerate(result.tokens))
        return replace(result, tokens=tokens, faults=self._faults)


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """A step whose logits are computed, or will be."""

    plan: StepPlan
    frame: StepFrame
    computed: Computed
    lost: list[int]  # positions of rows whose adapter could not be copied: the base model alone has computed them


class Drawing:
    """Draws steps in the order in which they began; at most one of them waits."""

    def __init__(
        self,
        model: Decoder,
        rows: Rows,
        vocabulary: RankVocabulary,
        sampler: Sampler,
        group: RankGroup,
        batch_of: Callable[[NDArray[np.int64]], LoraBatch | None],
    ) -> None:
        self._model = model
        self._batch_of = batch_of
        self._rows = rows
        self._vocabulary = vocabulary
        self._sampler = sampler
        self._group = group
        self._device = rows.newest_token.device
        self._scored_at_once = tokens_at_once(vocabulary.size)
        self.guides = Guides(vocabulary.size, self._device)
        self._undrawn: tuple[Ticket, DrawnStep] | None = None

    def seat(self, seats: Sequence[Seat]) -> None:
        self._sampler.seat(seats)
        if self._group.rank == 0:
            self.guides.seat(seats)

    def begin(self, step: DrawnStep | None) -> Ticket:
        """The ticket of a step that was just launched; None has no tokens."""
        assert self._undrawn is None, "the step before the last is collected before the next begins"
        if step is None:
            ticket = Ticket()
            ticket.complete(NO_TOKENS, self._device)
            return ticket
        # Rank 0 alone draws, so it alone has guides; the others wait for its tokens inside the draw.
        guided = self.guides.of(step.plan.sampled_rows)
        ticket = Ticket(guided)
        if any(guide.behind for _, guide in guided):
            self._undrawn = ticket, step
        else:
            self._draw_step(ticket, step)
        for _, guide in guided:
            guide.behind += 1
        return ticket

    def end(self, ticket: Ticket) -> StepResult:
        """Wait for a step's tokens, tell them to its guides, and draw the step that waited for them."""
        result = ticket.wait()
        for at, guide in ticket.guided:
            guide.accept(result.tokens[at])
        if self._undrawn is not None:
            undrawn, self._undrawn = self._undrawn, None
            self._draw_step(*undrawn)
        return result

    def _draw_step(self, ticket: Ticket, step: DrawnStep) -> None:
        rows = len(step.plan.sampled_rows)
        masks, faults = self.guides.guidance(ticket.guided, rows) if ticket.guided else (None, ())
        sampled = self._read(step, self._sample(step, masks))
        if step.lost:
            lost = torch.tensor(step.lost).to(self._device)
            sampled = replace(sampled, tokens=sampled.tokens.index_fill(0, lost, NO_TOKEN))
        ticket.complete(sampled, self._device, faults)

    def _sample(self, step: DrawnStep, masks: Masks | None) -> Sampled:
        """The tokens of the plan's rows: as computed if all are greedy, else as each row's request asks."""
        computed, frame = step.computed, step.frame
        host_rows = np.array(step.plan.sampled_rows, np.int64)
        decodes, chunks = len(step.plan.decodes), len(host_rows) - len(step.plan.decodes)
        greedy = _in_plan(computed.tokens, decodes, frame, chunks)
        if not self._sampler.needs(host_rows):
            return Sampled(greedy)
        logits, rows, lengths = (
            _in_plan(each, decodes, frame, chunks) for each in (computed.logits, computed.rows, computed.lengths)
        )
        sampled = self._draw(self._vocabulary.whole(logits), rows, lengths, host_rows, masks)
        # In place of the greedy tokens, which the computation has written: the next decode reads them.
        self._rows.newest_token[rows] = sampled.tokens
        tokens = sampled.tokens
        if sampled.is_stuck is not None:
            tokens = tokens.masked_fill(sampled.is_stuck, NO_CHOICE)
        # Of logits that are not numbers no choice means anything.
        return replace(sampled, tokens=tokens.masked_fill(greedy == NO_TOKEN, NO_TOKEN))

    def _draw(
        self, logits: Tensor, rows: Tensor, lengths: Tensor, host_rows: NDArray[np.int64], masks: Masks | None
    ) -> Sampled:
        """Rank 0 alone draws: the others' arithmetic may differ in the last digit, and their tokens must not."""
        if self._group.rank:
            return Sampled(self._group.tokens(torch.zeros(len(rows), dtype=torch.int64, device=self._device)))
        sampled = self._sampler.sample(logits, rows, lengths, host_rows, masks)
        return replace(sampled, tokens=self._group.tokens(sampled.tokens))

    def _read(self, step: DrawnStep, sampled: Sampled) -> Sampled:
        """What the hidden states of prompts tell, if it was asked for."""
        plan, hidden = step.plan, step.computed.hidden
        if not (plan.scorings or plan.pools):
            return sampled
        assert hidden is not None, "a step that gives its hidden states runs outside graphs"
        scores = None
        if plan.scorings:
            scores = score(plan, self._rows, hidden, self._all_logits, self._scored_at_once)
        return replace(sampled, scores=scores, pooled=pool(plan, hidden) if plan.pools else None)

    def _all_logits(self, hidden: Tensor, rows: NDArray[np.int64]) -> Tensor:
        # A step is drawn before the next is submitted: the rows' slots are still those of the step.
        return self._vocabulary.whole(self._model.logits(hidden, lora=self._batch_of(rows)))


def _in_plan(framed: Tensor, decodes: int, frame: StepFrame, chunks: int) -> Tensor:
    """The plan's rows of a frame's results: its decodes come first; its chunks lie behind the frame's last decode."""
    if not chunks:
        return framed[:decodes]
    if decodes == frame.decodes:
        return framed[: decodes + chunks]
    return torch.cat([framed[:decodes], framed[frame.decodes : frame.decodes + chunks]])


# ── scores ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# Scores say how likely each token of a prompt was after the tokens before it.

# The logits of a whole prompt would take gigabytes: 8,192 tokens in a vocabulary of 128,256 are 4.2 GB. This many bytes
# hold the logits of 65 tokens.
LOGIT_BYTES = 32 << 20

# Of hidden states, each with its row.
Logits = Callable[[Tensor, NDArray[np.int64]], Tensor]


def tokens_at_once(vocabulary: int) -> int:
    """How many tokens' logits are computed at a time."""
    return max(1, LOGIT_BYTES // (4 * vocabulary))


def score(plan: StepPlan, rows: Rows, hidden: Tensor, logits_of: Logits, at_once: int) -> Logprobs:
    """The log-probabilities of the plan's scorings, in order; hidden [tokens, hidden size], decodes first."""
    places = _places(plan)
    # The logits of a token give the probability of the next.
    starts = [places[one.row] + one.start - 1 for one in plan.scorings]
    lengths = [one.end - one.start for one in plan.scorings]
    before = torch.cat([hidden[start : start + length] for start, length in zip(starts, lengths, strict=True)])
    known = np.concatenate([rows.known(one.row, one.start, one.end) for one in plan.scorings])
    tokens = send(known, hidden.device).to(torch.int64)
    of_rows = np.repeat(np.array([one.row for one in plan.scorings], np.int64), lengths)
    most = max(one.top for one in plan.scorings)
    slices = zip(before.split(at_once), tokens.split(at_once), range(0, len(of_rows), at_once), strict=True)
    parts = [
        logprobs_of(logits_of(some, of_rows[first : first + at_once]).float(), chosen, most)
        for some, chosen, first in slices
    ]
    chosen, top_tokens, top = (torch.cat(part) for part in zip(*parts, strict=True))
    wanted = enumerate(np.repeat([one.top for one in plan.scorings], lengths).tolist())
    return Logprobs(chosen, top_tokens, top, tuple(wanted))


def _places(plan: StepPlan) -> dict[Row, int]:
    """By row, where the sequence's first token would lie among the tokens of the step."""
    places, end = {}, len(plan.decodes)
    for chunk in plan.chunks:
        places[chunk.row] = end - chunk.start
        end += chunk.length
    return places


# ── pools ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# Pools make one vector of the hidden states of a prompt's chunk.


def pool(plan: StepPlan, hidden: Tensor) -> Tensor:
    """[pools, hidden size] float32: the last hidden state of each pool's chunk, or the sum of all.

    hidden [tokens, hidden size]: those of decodes first, then of chunks, one after the other.
    """
    states = dict(zip((chunk.row for chunk in plan.chunks), _of_chunks(plan, hidden), strict=True))
    found = (states[one.row] if one.pooling == "mean" else states[one.row][-1:] for one in plan.pools)
    return torch.stack([some.float().sum(0) for some in found])


def _of_chunks(plan: StepPlan, hidden: Tensor) -> tuple[Tensor, ...]:
    return hidden[len(plan.decodes) :].split([chunk.length for chunk in plan.chunks])
