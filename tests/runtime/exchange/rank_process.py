"""One rank in a process of its own: `python -m tests.runtime.exchange.rank_process KIND FOLDER RANK`.

Reads an order a line on stdin, as JSON, and answers each with a line on stdout.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from rota.policy.prefill_delayer import PrefillDelayer, RankReport
from rota.runtime.replicas.exchange import all_gather
from rota.runtime.replicas.exchange.place import Board
from tests.runtime.exchange.doomed import Doomed
from tests.waiting import TIMEOUT_S, until

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
