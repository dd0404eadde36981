"""A request's seed is drawn once, where the request is made, and travels with the request.

So every process that computes the request draws the same tokens, also after a preemption.
"""

from __future__ import annotations

import secrets
from dataclasses import replace

from rota.core.request import MAX_SEED, SamplingParams


def seeded(sampling: SamplingParams, choice: int = 0) -> SamplingParams:
    """The parameters of one choice of a prompt. A greedy request needs no seed.

    The seed that a client gave belongs to the first choice. Each further choice has a seed of its own.
    """
    if sampling.is_greedy:
        return sampling
    if sampling.seed is None:
        return replace(sampling, seed=secrets.randbelow(MAX_SEED + 1))
    return replace(sampling, seed=(sampling.seed + choice) % (MAX_SEED + 1)) if choice else sampling
