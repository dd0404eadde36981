"""Threads are shared out by the size of a step: waking the others costs a small step more than they save it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from rota.engine.device import LIMITS, read_words

# Tokens of a step up to which it is a small one.
FEW_TOKENS = 4
# What is tried for small steps and for the others.
TRIED_FEW, TRIED_MANY = 1, 16
# One thread leaves the rest of the machine to others: all of them have to be worth it.
WORTH_IT = 0.95
# One and all are tried in turns, because a neighbour that is busy for a moment must not decide for the whole day.
TURNS = 3

# Seconds that a step of so many tokens takes with so many threads.
Seconds = Callable[[int, int], float]


@dataclass(frozen=True, slots=True)
class Threads:
    """How many compute a small step, and how many a larger one."""

    few: int
    many: int

    def use(self, tokens: int) -> None:
        """From here on, in this thread of Python."""
        torch.set_num_threads(self.few if tokens <= FEW_TOKENS else self.many)


def choose_threads(asked: int | Literal["auto"], found: int, seconds: Seconds) -> Threads:
    """As many as were asked for; 'auto' tries one and all that were found, each for both kinds of step."""
    if asked != "auto":
        return Threads(asked, asked)
    if found == 1:
        return Threads(1, 1)
    few, many = (_quicker(found, tokens, seconds) for tokens in (TRIED_FEW, TRIED_MANY))
    return Threads(few, many)


def _quicker(found: int, tokens: int, seconds: Seconds) -> int:
    turns = [(seconds(tokens, found), seconds(tokens, 1)) for _ in range(TURNS)]
    with_all, with_one = (min(tried) for tried in zip(*turns, strict=True))
    return found if with_all < WORTH_IT * with_one else 1


def set_threads() -> int:
    """Let torch use the processors this process may use, and say how many; a user's OMP_NUM_THREADS stands."""
    # oneDNN keeps a thousand compiled products, and torch's layer above it as many descriptions of them: hundreds of
    # megabytes for the many lengths of a server's life. 256 hold what padded rows ask for; with 64 a prompt's adapter
    # products took twice as long. Both look at this before their first product.
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, "256")
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(usable_processors(torch.get_num_threads()))
    return torch.get_num_threads()


def usable_processors(found: int, limits: Path = LIMITS) -> int:
    """Of the processors found, those a container grants the time of: "200000 100000" means two."""
    quota = read_words(limits / "cpu.max")
    if quota and quota[0].isdigit():
        return min(found, max(1, int(quota[0]) // int(quota[1])))
    return found
