"""Scores say how likely each token of a prompt was after the tokens before it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rota.core.ids import Row
from rota.core.plan import StepPlan
from rota.engine.device import send
from rota.engine.sampling.sampler import logprobs_of
from rota.engine.step.inputs import Rows
from rota.engine.step.results import Logprobs

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
