"""A group of threads in one process: each rank's part of a computation, run at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from rota.engine.parallel.group import RankGroup
from tests.waiting import TIMEOUT_S

Result = TypeVar("Result")


class ThreadRank(RankGroup):
    """One rank among threads that meet at a barrier."""

    def __init__(self, rank: int, given: list[Tensor | None], barrier: threading.Barrier) -> None:
        super().__init__(rank, len(given))
        self._given, self._barrier = given, barrier

    def gather(self, x: Tensor) -> Tensor:
        self._given[self.rank] = x
        self._barrier.wait()
        gathered = torch.stack([x for x in self._given if x is not None])
        self._barrier.wait()
        return gathered

    def sum(self, x: Tensor) -> Tensor:
        return self.gather(x).sum(0)

    def tokens(self, tokens: Tensor) -> Tensor:
        return self.gather(tokens)[0]

    def least(self, number: int) -> int:
        return int(self.gather(torch.tensor(number)).min())


def together(size: int, part: Callable[[RankGroup], Result]) -> list[Result]:
    """What `part` gives on every rank of a group."""
    given: list[Tensor | None] = [None] * size
    barrier = threading.Barrier(size, timeout=TIMEOUT_S)
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: part(ThreadRank(rank, given, barrier)), range(size)))
