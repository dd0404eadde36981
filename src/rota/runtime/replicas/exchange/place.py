"""A place is a folder of shared memory where replicas exchange reports, each on its own line of a board."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rota.core.config import EngineConfig
from rota.core.errors import ConfigError
from rota.policy.prefill_delayer import REPORT_LASTS_MS, Exchange, RankReport
from rota.runtime.replicas.exchange.all_gather import MOST_RANKS, AllGather
from rota.runtime.replicas.exchange.lines import MOST, SharedLines

# ── board ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# A board in shared memory has a line for each replica: a replica writes its own in every pass, and reads the others'.
#
# Nobody ever waits. A replica in a long step, an idle one and a dead one have one thing in common: they make no pass,
# so their line grows old. A line counts for a second. So nobody has to find out which of the three is the case, and a
# replica that comes back, or was started again, is in with its next pass.

WORDS = 8
_new = tuple.__new__  # an eighth of the time of a call by the names of all fields


class Board:
    """One rank's exchange. All ranks must go by the clock of one machine, as `time.monotonic` is."""

    def __init__(self, path: Path, rank: int) -> None:
        self._lines = lines = SharedLines(path, WORDS)
        self._rank = rank
        self._place = slice(rank * lines.line_bytes, (rank + 1) * lines.line_bytes)
        # A predecessor that was killed may have left half a line: the next write must differ from both halves.
        self._writes = lines.newest_write(rank)
        self._whole: list[tuple[int, ...]] = [(0,) * 2 * WORDS] * lines.count  # each line as it was last seen whole

    def share(self, report: RankReport) -> list[RankReport]:
        prefillable, below, running, batch, admissible, blocked, held, now, _, _ = report
        n = self._writes = self._writes % MOST + 1
        held_ms, at = min(held, MOST), now & MOST
        self._lines.memory[self._place] = self._lines.pairs.pack(
            prefillable, n, below, n, running, n, batch, n, admissible, n, blocked, n, held_ms, n, at, n
        )
        own = _new(RankReport, (prefillable, below, running, batch, admissible, blocked, held, now, self._rank, False))
        return self._hear(own) if running and admissible else [own]

    def _hear(self, own: RankReport) -> list[RankReport]:
        """As `on_board` says, in a third of its time: this is in the way of every pass with prompts."""
        reports, whole, rank = [], self._whole, self._rank
        latest = own.now_ms + REPORT_LASTS_MS
        for other, words in enumerate(self._lines.pairs.iter_unpack(self._lines.memory[:])):
            if other == rank:
                reports.append(own)
                continue
            prefillable, a, below, b, running, c, batch, d, admissible, e, blocked, f, held, g, at, h = words
            if a == b == c == d == e == f == g == h:
                whole[other] = words
            else:  # torn: its writer is at it, and what stood there before is as good
                prefillable, _, below, _, running, _, batch, _, admissible, _, blocked, _, held, _, at, _ = whole[other]
            if running or admissible or blocked:
                early = latest - at & MOST  # the line has the lower half of its time; the upper half is that of now
                if early <= 2 * REPORT_LASTS_MS:
                    said = (prefillable, below, running, batch, admissible, blocked, held, latest - early, other, False)
                    reports.append(_new(RankReport, said))
        return reports

    def close(self) -> None:
        self._lines.close()


# ── place ───────────────────────────────────────────────────────────────────────────────────────────────────────────

# Memory, where there is such a folder: a write to a file on a disk would be written to the disk too, later.
_MEMORY = Path("/dev/shm")


@contextmanager
def exchange_place(config: EngineConfig, replicas: int) -> Iterator[EngineConfig]:
    """The config of all replicas, with a place to exchange reports while the block lasts, if they need one."""
    if replicas == 1 or not config.policy.enable_prefill_delayer:
        yield config
        return
    is_gathered = config.policy.prefill_delayer_exchange == "all-gather"
    if is_gathered and replicas > MOST_RANKS:
        raise ConfigError(
            f"prefill_delayer_exchange is 'all-gather', but at most {MOST_RANKS} replicas can wait for each other in "
            f"every pass, and there are {replicas}; take 'board'."
        )
    folder = Path(tempfile.mkdtemp(prefix="rota-", dir=_MEMORY if _MEMORY.is_dir() else None))
    try:
        if is_gathered:
            AllGather.create(folder, replicas)
        else:
            SharedLines.create(folder / "board", replicas, WORDS)
        yield replace(config, exchange_at=str(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def open_exchange(config: EngineConfig) -> tuple[Exchange, AllGather | None]:
    """This replica's side of the place, and who may want a pass of an idle loop: others, where a pass waits for all."""
    folder, rank = Path(config.exchange_at), int(config.engine_id)
    if config.policy.prefill_delayer_exchange == "all-gather":
        gather = AllGather(folder, rank)
        return gather, gather
    return Board(folder / "board", rank), None
