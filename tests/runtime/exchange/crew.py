"""A crew is four ranks in processes of their own, which do what a test says.

A rank is `python -m tests.runtime.exchange.crew KIND FOLDER RANK`. It reads an order a line on stdin, as JSON, and
answers each with a line on stdout.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

from rota.core.config import EngineConfig
from rota.core.policy_config import PolicyConfig
from rota.policy.prefill_delayer import PrefillDelayer, RankReport
from rota.runtime.replicas.exchange import all_gather
from rota.runtime.replicas.exchange.place import Board, exchange_place
from tests.processes import PIPE, Program, started
from tests.runtime.exchange.doomed import Doomed
from tests.waiting import TIMEOUT_S, line_of, until

RANKS = 4


class Crew:
    """Orders go to several ranks at a time, and all are given before the first answer is read."""

    def __init__(self, kind: str, folder: Path, stack: ExitStack) -> None:
        self.kind = kind
        self.folder = folder
        self._stack = stack
        self._programs: list[Program] = [self._start(rank) for rank in range(RANKS)]

    def _start(self, rank: int) -> Program:
        command = [sys.executable, "-m", "tests.runtime.exchange.crew", self.kind, str(self.folder), str(rank)]
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


# ── one rank ──────────────────────────────────────────────────────────────────────────────────────────────────────────

# How long a rank here waits for a living one: longer than a test waits for an answer, so that no answer is owed to it.
LIVING_S = 2 * TIMEOUT_S
NOTHING_TO_DO = RankReport(is_prefillable=False, is_below_watermark=False, running=0, largest_batch=0, admissible=0)


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("dead")


class RankProcess:
    """The orders, by name."""

    def __init__(self, kind: str, folder: Path, rank: int) -> None:
        self._exchange = Board(folder / "board", rank) if kind == "board" else Doomed(folder, rank, _die)

    def new(self, batch: int, **fields: Any) -> None:
        """From now on another delayer decides."""
        self._delayer = PrefillDelayer(max_running=fields.pop("max_running", 10), exchange=self._exchange, **fields)
        if batch:
            self._delayer.note_batch(batch)

    def decide(self, **seen: Any) -> dict[str, Any]:
        verdict = self._delayer.decide(**seen)
        return {"reason": verdict.reason, "passes": verdict.passes, "waited_s": verdict.waited_s}

    def share(self, **said: Any) -> dict[str, Any]:
        exchange = self._exchange
        reports = exchange.share(RankReport(**said))
        number = exchange.round - 1 if isinstance(exchange, Doomed) and exchange.is_member else None
        return {"round": number, "reports": [report._asdict() for report in reports]}

    def meet(self, ranks: int) -> None:
        """Make a pass whenever another rank calls, as a loop does, until so many are in."""
        exchange, ends_at = self._exchange, time.monotonic() + TIMEOUT_S
        assert isinstance(exchange, Doomed)
        while len(exchange.share(NOTHING_TO_DO)) < ranks:
            assert time.monotonic() < ends_at
            until(exchange.is_called, within_s=0.05)

    def wait_at_most(self, timeout_s: float) -> None:
        """For a living rank, from now on. A busy machine may hold up any process, so tests wait long."""
        all_gather.TIMEOUT_S = timeout_s

    def doom(self, point: str) -> None:
        assert isinstance(self._exchange, Doomed)
        self._exchange.dies_at = point

    def hammer(self, first: int, last: int) -> None:
        """Write lines whose numbers are all the same."""
        for number in range(first, last + 1):
            self._exchange.share(RankReport(True, False, number, number, number, False, number))


if __name__ == "__main__":
    kind, folder, rank = sys.argv[1:]
    process = RankProcess(kind, Path(folder), int(rank))
    process.wait_at_most(LIVING_S)
    for line in sys.stdin:
        order, fields = json.loads(line)
        print(json.dumps(getattr(process, order)(**fields)), flush=True)
