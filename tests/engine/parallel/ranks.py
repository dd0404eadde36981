"""A group of ranks for tests: processes that stay, and a device over them that a loop drives like any other."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from queue import Queue
from typing import Any

from rota.core.capacity import Capacity
from rota.core.config import EngineConfig
from rota.core.messages import AdapterFailed, Message
from rota.core.plan import StepPlan, StepResult
from rota.runtime.world import Device
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
        command = [sys.executable, "-m", "tests.engine.parallel.rank_process", listener.address, str(size)]
        stack.enter_context(started(command, cwd=ROOT, stdout=None, env=os.environ | environment))
        by_rank = {}
        for _ in range(size):
            connection = stack.enter_context(listener.accept())
            by_rank[connection.recv()] = connection
        yield Ranks([by_rank[rank] for rank in range(size)], folder)
