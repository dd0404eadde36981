"""An all-gather gives every rank the same reports in every round; all ranks take part in every round, idle ones too.

Rounds are numbered. In a round each member writes its line, and waits until every member has written or is marked as
out. A dead rank is marked at once, and a living one that does not come is marked after a second. Who is in the next
round follows from the lines of this one: whoever has written, and whoever a line invites. So all members know the same,
and there is no rank on which the others depend.

A rank that was left out, or has just started, wishes to come in, and decides alone until a line invites that rank.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from rota.core.errors import RotaError
from rota.policy.prefill_delayer import RankReport
from rota.runtime.replicas.exchange.lines import MOST, SharedLines

# ── bells ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# A bell wakes a rank from another process: a pipe in a folder, which outlives the processes that ring or hear it.


class Bells:
    """Every rank's bell. A rank may wait for its own, and ring the others'."""

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        # Open for both directions, a pipe breaks with no reader and ends with no writer.
        flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
        bells = [os.open(folder / f"bell-{number}", flags) for number in range(ranks)]
        self._own = bells.pop(rank)
        self._others = bells
        self._poll = select.poll()
        self._poll.register(self._own, select.POLLIN)

    @staticmethod
    def create(folder: Path, ranks: int) -> None:
        for number in range(ranks):
            os.mkfifo(folder / f"bell-{number}", 0o600)

    def fileno(self) -> int:
        """Readable once the rank's own bell was rung."""
        return self._own

    def ring(self) -> None:
        for bell in self._others:
            with suppress(BlockingIOError):  # full of rings already
                os.write(bell, b"!")

    def wait(self, wait_s: float) -> bool:
        """Whether the rank's own bell is rung within this time, or was rung before."""
        return bool(self._poll.poll(wait_s * 1000.0)) and self.hush()

    def hush(self) -> bool:
        """Forget all rings so far; True if there were any."""
        with suppress(BlockingIOError):
            return bool(os.read(self._own, 4096))
        return False

    def close(self) -> None:
        for bell in (self._own, *self._others):
            os.close(bell)


# ── marks ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# Marks say which ranks are in an all-gather; the kernel's locks decide where two processes could differ.
#
# A rank writes its line of a round with its gate closed. Whoever leaves a rank out of a round marks that with the
# same gate closed, and only if the line is not there. So a rank is in a round or is marked as out, for all to see,
# whoever dies meanwhile: the kernel opens the gates of the dead. A process holds its life lock until it ends, so a
# life lock that is free says for sure that its process is dead.

# The numbers of a rank: the round with which it came in, the round from which it is out (it is in while `SINCE` is the
# larger), 1 while it wants to come in, and the last round that it began.
SINCE, OUT, WISH, SAID = range(4)
_MARKS = 4
# A predecessor that was killed is gone within this time, or something else is wrong.
TAKE_OVER_S = 5.0
# A gate is closed for microseconds. A process that was stopped meanwhile must not stop the others.
GATE_S = 0.1
_RETRY_S = 0.001


class RankMarks:
    """Every rank's numbers, gate and life lock. Rounds are counted from 1."""

    def __init__(self, folder: Path, rank: int) -> None:
        with (folder / "marks").open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        # Assigning an item of this view is one store of eight bytes.
        self._numbers = memoryview(self._memory).cast("Q")
        self.ranks = len(self._numbers) // _MARKS
        self._rank = rank
        self._gates = [_open(folder / f"gate-{number}") for number in range(self.ranks)]
        self._lives = [_open(folder / f"life-{number}") for number in range(self.ranks)]
        self._door = _open(folder / "door")
        if not _lock(self._lives[rank], TAKE_OVER_S):
            raise RotaError(f"Replica {rank} cannot share reports: another process still is replica {rank}.")

    @staticmethod
    def create(folder: Path, ranks: int) -> None:
        """The files of a round in which nobody is."""
        (folder / "marks").write_bytes(bytes(8 * _MARKS * ranks))
        for number in range(ranks):
            (folder / f"gate-{number}").touch()
            (folder / f"life-{number}").touch()
        (folder / "door").touch()

    def get(self, mark: int, rank: int) -> int:
        return self._numbers[_MARKS * rank + mark]

    def set(self, mark: int, rank: int, number: int) -> None:
        self._numbers[_MARKS * rank + mark] = number

    def latest(self) -> int:
        """No round with a larger number was ever begun."""
        return max(self._numbers)

    def is_in(self, rank: int) -> bool:
        return self.get(SINCE, rank) > self.get(OUT, rank)

    def is_dead(self, rank: int) -> bool:
        if rank == self._rank or not _lock(self._lives[rank], kind=fcntl.LOCK_SH):
            return False
        fcntl.flock(self._lives[rank], fcntl.LOCK_UN)
        return True

    def gate(self, rank: int) -> AbstractContextManager[bool]:
        """Closes a rank's gate; False if another process holds the gate for too long."""
        return _holding(self._gates[rank])

    def door(self) -> AbstractContextManager[bool]:
        """One process at a time may come in."""
        return _holding(self._door)

    def close(self) -> None:
        self._numbers.release()
        self._memory.close()
        for file in (*self._gates, *self._lives, self._door):
            os.close(file)


def _open(path: Path) -> int:
    """Not inherited by programs that this process starts, so that none of them keeps a lock."""
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


@contextmanager
def _holding(file: int) -> Iterator[bool]:
    is_held = _lock(file, GATE_S)
    try:
        yield is_held
    finally:
        if is_held:
            fcntl.flock(file, fcntl.LOCK_UN)


def _lock(file: int, within_s: float = 0.0, kind: int = fcntl.LOCK_EX) -> bool:
    ends_at = 0.0
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            now = time.monotonic()
            ends_at = ends_at or now + within_s
            if now >= ends_at:
                return False
            time.sleep(_RETRY_S)
        else:
            return True


# A report as numbers, the upper half of its time, the members of the round and those they invite, as bits.
WORDS = 11
MOST_RANKS = 32
# A living rank that has not come after this time is left out: nobody waits longer.
TIMEOUT_S = 1.0
# How often a rank that waits looks whether another has died, of which no bell tells.
LOOK_S = 0.02

Said = dict[int, tuple[int, ...]]  # the lines of a round, by rank


class LateError(Exception):
    """The others are in later rounds: they have left this rank out."""


class AllGather:
    """One rank's exchange. Not for several threads."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._rank = rank
        self._marks = RankMarks(folder, rank)
        self._lines = SharedLines(folder / "lines", WORDS)
        self._bells = Bells(folder, rank, self._marks.ranks)
        self.round = 0  # that this rank takes part in next, while it is a member
        self._members = 0  # of that round, as bits; 0: this rank is none
        self._joined = 0  # which of them were not in the round before
        # The process that had this number before is out, also if nobody has noticed its death.
        self._leave()
        self._bells.ring()

    @staticmethod
    def create(folder: Path, ranks: int) -> None:
        """The files of an all-gather in which nobody is."""
        RankMarks.create(folder, ranks)
        Bells.create(folder, ranks)
        SharedLines.create(folder / "lines", 2 * ranks, WORDS)

    def share(self, report: RankReport) -> list[RankReport]:
        """The reports of a round; this rank's alone while it is in none."""
        own = report._replace(rank=self._rank)
        try:
            if not self._members and not self._come_in():
                return [own]
            self._say(own)
            said = self._hear()
        except LateError:
            self._leave()
            return [own]
        reports = [_report(rank, said[rank], bool(self._joined >> rank & 1)) for rank in sorted(said)]
        self._members, self._joined = _next_members(said)
        self.round += 1
        return reports

    # ── a round ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _say(self, own: RankReport) -> None:
        marks = self._marks
        with marks.gate(self._rank) as is_closed:
            if not is_closed or marks.get(OUT, self._rank) >= self.round:
                raise LateError
            marks.set(SAID, self._rank, self.round)
            numbers = _numbers(own, self._members, self._wishes())
            self._lines.write(_slot(self._rank, self.round), _write(self.round), numbers)

    def _hear(self) -> Said:
        """Waits for every member of the round, and no longer than for a rank that must be left out."""
        said, missing = self._look(self.round, self._members)
        if len(said) == 1 or not missing:
            self._bells.ring()  # the first rank calls the others, and the last one ends their wait
        began_at = looked_at = time.monotonic()
        while missing:
            self._bells.wait(LOOK_S)
            now = time.monotonic()
            if now - looked_at >= LOOK_S:  # however often others ring
                self._leave_out_late(missing, now - began_at - TIMEOUT_S)
                looked_at = now
            said, missing = self._look(self.round, self._members)
        return said

    def _leave_out_late(self, missing: list[int], late_s: float) -> None:
        if late_s > TIMEOUT_S:  # another process was stopped inside a gate
            raise LateError
        for rank in missing:
            if late_s > 0.0 or self._marks.is_dead(rank):
                self._leave_out(rank)

    def _look(self, round: int, members: int) -> tuple[Said, list[int]]:
        """The lines of a round, and the members of which neither a line nor a mark is there."""
        said, missing = {}, []
        for rank in _ranks(members):
            if (numbers := self._line(rank, round)) is not None:
                said[rank] = numbers
            elif self._marks.get(SAID, rank) > round + 1:
                raise LateError
            elif self._marks.get(OUT, rank) != round:
                missing.append(rank)
        return said, missing

    def _leave_out(self, rank: int) -> None:
        """Mark a rank as out of this round, unless its line has come."""
        with self._marks.gate(rank) as is_closed:
            if not is_closed:
                return
            if self._marks.get(SAID, rank) > self.round + 1 or self._marks.get(OUT, rank) > self.round:
                raise LateError
            if self._line(rank, self.round) is None:
                self._marks.set(OUT, rank, self.round)
                self._marks.set(WISH, rank, 0)

    def _line(self, rank: int, round: int) -> tuple[int, ...] | None:
        line = self._lines.read(_slot(rank, round))
        return line[1] if line and line[0] == _write(round) else None

    def _wishes(self) -> int:
        """The ranks that want to come in, as bits."""
        marks = self._marks
        return sum(1 << rank for rank in range(marks.ranks) if marks.get(WISH, rank)) & ~self._members

    # ── who is in ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _come_in(self) -> bool:
        """Become a member: by an invitation, or as the first if no living rank is in. If neither, wish for it."""
        with self._marks.door() as is_only:
            if is_only and (self._accept() or self._found()):
                self._marks.set(SINCE, self._rank, self.round)
                self._marks.set(WISH, self._rank, 0)
                return True
        self._marks.set(WISH, self._rank, 1)
        self._bells.ring()
        return False

    def _found(self) -> bool:
        marks, others = self._marks, self._others()
        if any(marks.is_in(rank) and not marks.is_dead(rank) for rank in others):
            return False
        self.round = marks.latest() + 2
        self._members = self._joined = 1 << self._rank
        for rank in others:
            marks.set(OUT, rank, self.round - 1)  # what the dead have said invites nobody any more
        return True

    def _accept(self) -> bool:
        """Come in with the round after one in which a line invites this rank, once that round is complete."""
        for round, members in self._invitations():
            try:
                said, missing = self._look(round, members)
            except LateError:
                continue
            if not missing:
                self._members, self._joined = _next_members(said)
                self.round = round + 1
                return True
        return False

    def _invitations(self) -> list[tuple[int, int]]:
        """Rounds with a line that invites this rank, the latest first, and their members."""
        marks, found = self._marks, set()
        for rank in range(marks.ranks):
            said = marks.get(SAID, rank)
            for round in (said, said - 1):
                line = self._line(rank, round) if round >= max(1, marks.get(OUT, self._rank)) else None
                if line and line[-1] >> self._rank & 1:
                    found.add((round, line[-2]))
        return sorted(found, reverse=True)

    def _leave(self) -> None:
        """Out from the next round that this rank has not written a line of."""
        marks, rank = self._marks, self._rank
        said = marks.get(SAID, rank)
        with marks.gate(rank):
            after = said + 1 if self._line(rank, said) else said
            marks.set(OUT, rank, max(after, marks.get(OUT, rank), marks.get(SINCE, rank)))
            marks.set(WISH, rank, 0)
        self._members = 0

    # ── the loop's side ──────────────────────────────────────────────────────────────────────────────────────────────

    def fileno(self) -> int:
        """Readable when another rank has rung: then `is_called` says whether a pass is due."""
        return self._bells.fileno()

    def is_called(self) -> bool:
        """Does another rank wait for a pass of this one? A ring alone says nothing: rings are late, and too many."""
        self._bells.hush()
        if not self._members:
            return bool(self._invitations())
        others = (rank for rank in _ranks(self._members) if rank != self._rank)
        return bool(self._wishes()) or any(self._marks.get(SAID, rank) >= self.round for rank in others)

    def _others(self) -> list[int]:
        return [rank for rank in range(self._marks.ranks) if rank != self._rank]

    def close(self) -> None:
        """Leave at once, so that nobody waits."""
        self._leave()
        self._bells.ring()
        self._bells.close()
        self._lines.close()
        self._marks.close()


def _next_members(said: Said) -> tuple[int, int]:
    """The members of the next round, and which of them are new."""
    present = sum(1 << rank for rank in said)
    joined = 0
    for numbers in said.values():
        joined |= numbers[-1]
    joined &= ~present
    return present | joined, joined


def _numbers(report: RankReport, members: int, invited: int) -> list[int]:
    *said, held_ms, now_ms, _, _ = report
    return [*map(int, said), min(held_ms, MOST), now_ms & MOST, now_ms >> 32, members, invited]


def _report(rank: int, numbers: tuple[int, ...], has_joined: bool) -> RankReport:
    *said, low, high, _, _ = numbers
    return RankReport._make((*said, high << 32 | low, rank, has_joined))


def _ranks(bits: int) -> list[int]:
    return [rank for rank in range(bits.bit_length()) if bits >> rank & 1]


def _slot(rank: int, round: int) -> int:
    """Two lines a rank, in turn: a rank may be a round ahead while another still reads."""
    return 2 * rank + round % 2


def _write(round: int) -> int:
    return round % MOST + 1
