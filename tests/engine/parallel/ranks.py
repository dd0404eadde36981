"""A group of ranks for tests: processes that stay, and a device over them that a loop drives like any other.

python -m tests.engine.parallel.ranks SOCKET RANKS
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from queue import Queue
from typing import Any

import torch

from rota.core.capacity import Capacity
from rota.core.config import EngineConfig
from rota.core.messages import AdapterFailed, Message
from rota.core.plan import StepPlan, StepResult
from rota.engine.build import build_engine
from rota.engine.drawing import Ticket
from rota.engine.engine import Engine
from rota.runtime.world import Device
from tests.engine.fake_grammars import FakeGrammars
from tests.processes import started
from tests.waiting import TIMEOUT_S

ROOT = Path(__file__).parents[3]


class RankError(AssertionError):
    """A rank said why it cannot do what it was told."""


class Ranks:
    """So many processes; `build` gives them a model, any number of times."""

    def __init__(self, connections: list[Connection], folder: Path) -> None:
        self._connections, self._folder = connections, folder
        self.size = len(connections)
        self._answers: list[Queue[tuple[str, Any]]] = [Queue() for _ in connections]
        self._post: Callable[[Message], None] = lambda _: None
        self._said: Counter[tuple[type, int]] = Counter()
        self._hearing = threading.Lock()
        self._meetings = 0
        for rank in range(self.size):
            threading.Thread(target=self._hear, args=(rank,), daemon=True).start()

    def build(self, config: EngineConfig, kv_blocks: Sequence[int | None] = ()) -> GroupDevice:
        """The ranks' engines; `kv_blocks` may be another number on each rank."""
        self.tell("close", None)
        self.answers("closed")
        self._said.clear()
        self._meetings += 1
        model = replace(config.model, tensor_parallel_size=self.size)
        meeting = f"file://{self._folder}/meeting{self._meetings}"
        config = replace(config, model=model, meeting=meeting, local_ranks=self.size)
        blocks = kv_blocks or [config.cache.kv_blocks] * self.size
        for connection, found in zip(self._connections, blocks, strict=True):
            connection.send(("build", replace(config, cache=replace(config.cache, kv_blocks=found))))
        capacities = self.answers("capacity")
        # Each has measured its own speed.
        assert len({replace(one, decode_s=0.0, token_s=0.0) for one in capacities}) == 1, "ranks differ"
        return GroupDevice(self, capacities[0])

    def listen(self, post: Callable[[Message], None]) -> None:
        self._post = post

    def tell(self, what: str, value: Any) -> None:
        for connection in self._connections:
            connection.send((what, value))

    def answers(self, what: str) -> list[Any]:
        """One of each rank, in their order."""
        told = [queue.get(timeout=TIMEOUT_S) for queue in self._answers]
        for kind, value in told:
            if kind != what:
                raise RankError(value)
        return [value for _, value in told]

    def _hear(self, rank: int) -> None:
        while True:
            try:
                what, value = self._connections[rank].recv()
            except (EOFError, OSError):
                self._answers[rank].put(("error", f"rank {rank} is gone"))
                return
            if what == "message":
                self._hear_message(value)
            else:
                self._answers[rank].put((what, value))

    def _hear_message(self, message: Message) -> None:
        """What is so on all ranks is so; what failed on one has failed."""
        key = (type(message), getattr(message, "adapter_id", 0))
        with self._hearing:
            self._said[key] += 1
            is_so = self._said[key] % self.size == (1 if isinstance(message, AdapterFailed) else 0)
        if is_so:
            self._post(message)


class GroupDevice(Device[int]):
    """A device of several ranks: each gets every plan; their tokens must be the same."""

    def __init__(self, ranks: Ranks, capacity: Capacity) -> None:
        self._ranks = ranks
        self._capacity = capacity
        self.plans: list[StepPlan] = []

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    def listen(self, post: Callable[[Message], None]) -> None:
        self._ranks.listen(post)

    def submit(self, plan: StepPlan) -> int:
        self.plans.append(plan)
        self._ranks.tell("step", plan)
        return len(self.plans)

    def collect(self, ticket: int) -> StepResult:
        results, newest = zip(*self._ranks.answers("result"), strict=True)
        assert len({result.tokens for result in results}) == 1, f"ranks disagree about step {ticket}: {results}"
        assert all(tokens == newest[0] for tokens in newest), "ranks remember different tokens"
        first: StepResult = results[0]
        return first

    def close(self) -> None:
        """The processes stay."""


class OverlappedDevice(GroupDevice):
    """Two steps may be under way on every rank, as they are behind a loop of depth 2."""

    def __init__(self, ranks: Ranks, capacity: Capacity) -> None:
        super().__init__(ranks, capacity)
        ranks.tell("use_grammars", None)
        ranks.answers("used")

    def submit(self, plan: StepPlan) -> int:
        self.plans.append(plan)
        self._ranks.tell("begin", plan)
        return len(self.plans)

    def collect(self, ticket: int) -> StepResult:
        self._ranks.tell("finish", None)
        return super().collect(ticket)


@contextmanager
def started_ranks(size: int, folder: Path, **environment: str) -> Iterator[Ranks]:
    """`environment` is added to this process's."""
    with ExitStack() as stack:
        listener = stack.enter_context(Listener(str(folder / f"ranks{size}"), backlog=size))
        command = [sys.executable, "-m", "tests.engine.parallel.ranks", listener.address, str(size)]
        stack.enter_context(started(command, cwd=ROOT, stdout=None, env=os.environ | environment))
        by_rank = {}
        for _ in range(size):
            connection = stack.enter_context(listener.accept())
            by_rank[connection.recv()] = connection
        yield Ranks([by_rank[rank] for rank in range(size)], folder)


class Rank:
    """One of the processes: it builds engines and carries out plans. What arrives or is told is (what, value)."""

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
