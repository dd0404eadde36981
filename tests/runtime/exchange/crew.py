"""A crew is four ranks in processes of their own, which do what a test says."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rota.core.config import EngineConfig
from rota.core.policy_config import PolicyConfig
from rota.runtime.replicas.exchange.place import exchange_place
from tests.processes import PIPE, Program, started
from tests.waiting import TIMEOUT_S, line_of

RANKS = 4


class Crew:
    """Orders go to several ranks at a time, and all are given before the first answer is read."""

    def __init__(self, kind: str, folder: Path, stack: ExitStack) -> None:
        self.kind = kind
        self.folder = folder
        self._stack = stack
        self._programs: list[Program] = [self._start(rank) for rank in range(RANKS)]

    def _start(self, rank: int) -> Program:
        command = [sys.executable, "-m", "tests.runtime.exchange.rank_process", self.kind, str(self.folder), str(rank)]
        return self._stack.enter_context(started(command, stdin=PIPE))

    def begin(self, rank: int, order: str, **fields: Any) -> None:
        stdin = self._programs[rank].stdin
        assert stdin is not None
        stdin.write(json.dumps([order, fields]) + "\n")
        stdin.flush()

    def end(self, rank: int) -> Any:
        return json.loads(line_of(self._programs[rank]))

    def order(self, ranks: Sequence[int], order: str, *each: dict[str, Any]) -> list[Any]:
        """One answer of each rank. `each` has the fields for each of the ranks, or those for all."""
        fields = each if len(each) == len(ranks) else (each or ({},)) * len(ranks)
        for rank, one in zip(ranks, fields, strict=True):
            self.begin(rank, order, **one)
        return [self.end(rank) for rank in ranks]

    def meet(self, ranks: Sequence[int] = range(RANKS)) -> None:
        """Share until all of these ranks are in."""
        self.order(ranks, "meet", {"ranks": len(ranks)})

    def wait_for_death(self, rank: int) -> None:
        self._programs[rank].wait(TIMEOUT_S)

    def restart(self, rank: int) -> None:
        self._programs[rank] = self._start(rank)


@contextmanager
def crew_of(kind: str) -> Iterator[Crew]:
    policy = PolicyConfig(enable_prefill_delayer=True, prefill_delayer_exchange=kind)  # type: ignore[arg-type]
    with exchange_place(EngineConfig(policy=policy), RANKS) as config, ExitStack() as stack:
        yield Crew(kind, Path(config.exchange_at), stack)
