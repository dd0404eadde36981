"""Threads are chosen by the size of a step: for a small step, waking more threads costs more than they save."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from rota.engine.autotune import chosen
from rota.machine import usable_processors

# A step of up to this many tokens is small.
FEW_TOKENS = 4
# Tokens of the steps that are timed: a small step, and a larger one.
TRIED_FEW, TRIED_MANY = 1, 16
# All threads must take at most this share of one thread's time: one thread leaves the other cores free.
WORTH_IT = 0.95
# One and all are tried in turns, because a neighbour that is busy for a moment must not decide for the whole day.
# The first turn warms up, and the quickest one counts.
TURNS = 3

# (tokens, threads) -> seconds of a step.
Seconds = Callable[[int, int], float]


@dataclass(frozen=True, slots=True)
class Threads:
    """The number of threads for a small step, and for a larger one."""

    few: int
    many: int

    def use(self, tokens: int) -> None:
        """Set torch's threads for a step of `tokens` tokens, in this Python thread."""
        torch.set_num_threads(self.few if tokens <= FEW_TOKENS else self.many)


def choose_threads(asked: int | Literal["auto"], found: int, seconds: Seconds) -> Threads:
    """The configured number; 'auto' times one thread and all `found` threads, for both kinds of step."""
    if asked != "auto":
        return Threads(asked, asked)
    if found == 1:
        return Threads(1, 1)
    few, many = (_chosen(found, tokens, seconds) for tokens in (TRIED_FEW, TRIED_MANY))
    return Threads(few, many)


def _chosen(found: int, tokens: int, seconds: Seconds) -> int:
    name = f"threads of {found} for {tokens} tokens"
    (threads,) = chosen(name, lambda: (_quicker(found, tokens, seconds),), lambda choice: choice in ((1,), (found,)))
    return threads


def _quicker(found: int, tokens: int, seconds: Seconds) -> int:
    turns = [(seconds(tokens, found), seconds(tokens, 1)) for _ in range(TURNS)]
    with_all, with_one = (min(tried) for tried in zip(*turns, strict=True))
    return found if with_all < WORTH_IT * with_one else 1


def set_threads(replicas: int = 1) -> int:
    """Let torch use this replica's share of the processors, and return how many.

    A user's OMP_NUM_THREADS says how many there are for all replicas together.
    """
    # oneDNN keeps a thousand compiled products, and torch's layer above keeps as many descriptions. For the many prompt
    # lengths of a server that is hundreds of megabytes. 256 are enough for padded rows; with 64 a prompt's adapter
    # products took twice as long. Both libraries read the variables before their first product.
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, "256")
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(usable_processors(torch.get_num_threads()))
    if replicas > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // replicas))
    return torch.get_num_threads()
