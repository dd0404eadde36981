"""The ranks of a test's group: processes that build engines and carry out plans, as their test tells them.

python -m tests.engine.parallel.rank_process SOCKET RANKS
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from dataclasses import replace
from multiprocessing.connection import Client, Connection
from typing import Any

import torch

from rota.core.config import EngineConfig
from rota.core.plan import StepPlan
from rota.engine.build import build_engine
from rota.engine.drawing import Ticket
from rota.engine.engine import Engine
from tests.engine.fake_grammars import FakeGrammars


class Rank:
    """What arrives is (what, value); what is told is (what, value) too."""

    def __init__(self, told: Connection, number: int) -> None:
        self._told, self._number = told, number
        self._telling = threading.Lock()
        self._engine: Engine | None = None
        self._under_way: deque[Ticket] = deque()

    def run(self) -> None:
        while True:
            what, value = self._told.recv()
            if what == "end":
                return
            try:
                getattr(self, what)(value)
            except Exception as error:  # the border of a process: the test hears why
                self.tell("error", f"rank {self._number}: {type(error).__name__}: {error}")

    def tell(self, what: str, value: Any) -> None:
        with self._telling:
            self._told.send((what, value))

    def build(self, config: EngineConfig) -> None:
        self._engine = build_engine(replace(config, rank=self._number))
        self._engine.listen(lambda message: self.tell("message", message))
        self.tell("capacity", self._engine.capacity)

    def step(self, plan: StepPlan) -> None:
        assert self._engine is not None
        result = self._engine.collect(self._engine.submit(plan))
        self.tell("result", (result, self._engine._rows.newest_token.tolist()))

    def begin(self, plan: StepPlan) -> None:
        """Start a step, which is collected by `finish`: two may be under way."""
        assert self._engine is not None
        self._under_way.append(self._engine.submit(plan))

    def finish(self, _: None) -> None:
        assert self._engine is not None
        result = self._engine.collect(self._under_way.popleft())
        self.tell("result", (result, self._engine._rows.newest_token.tolist()))

    def use_grammars(self, _: None) -> None:
        assert self._engine is not None
        self._engine.use_grammars(FakeGrammars())
        self.tell("used", None)

    def break_copies(self, rank: int) -> None:
        """From now on this rank cannot copy an adapter into a slot."""
        assert self._engine is not None
        assert self._engine._adapters is not None
        if rank == self._number:
            self._engine._adapters.bank.copy_in = fail  # type: ignore[method-assign, assignment]
        self.tell("broken", None)

    def close(self, _: None) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        self.tell("closed", None)


def fail(*_: object) -> None:
    raise OSError("this rank's device has failed")


if __name__ == "__main__":
    torch.set_num_threads(1)
    # To import torch takes longer than most tests: it is imported once, before the ranks part.
    ranks = range(int(sys.argv[2]))
    rank = next((rank for rank in ranks[1:] if os.fork() == 0), 0)
    with Client(sys.argv[1]) as connection:
        connection.send(rank)
        Rank(connection, rank).run()
