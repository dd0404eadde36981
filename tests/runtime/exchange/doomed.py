"""A rank that dies at a chosen point of its next round."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from rota.policy.prefill_delayer import RankReport
from rota.runtime.replicas.exchange.all_gather import AllGather, Said

BEFORE, WITHIN, BEHIND, AFTER = POINTS = (
    "before its line",
    "within its line",
    "behind its line",
    "after the round",
)


class Doomed(AllGather):
    """Lives on while `dies_at` is empty; `die` must not return."""

    def __init__(self, folder: Path, rank: int, die: Callable[[], NoReturn]) -> None:
        super().__init__(folder, rank)
        self.dies_at = ""
        self.stall_s = 0.0
        self._die = die
        self._write_whole, self._lines.write = self._lines.write, self._write  # type: ignore[method-assign]

    @property
    def is_member(self) -> bool:
        return bool(self._members)

    def abandon(self) -> None:
        """What the kernel does for a process that was killed: close its files, and tell nobody."""
        self._bells.close()
        self._lines.close()
        self._marks.close()

    def _write(self, line: int, write: int, numbers: list[int]) -> None:
        if self.dies_at == BEFORE:
            self._die()
        if self.dies_at == WITHIN:
            size = self._lines.line_bytes
            before = self._lines.memory[line * size : (line + 1) * size]
            self._write_whole(line, write, numbers)
            self._lines.memory[line * size + size // 2 : (line + 1) * size] = before[size // 2 :]
            self._die()
        self._write_whole(line, write, numbers)

    def _hear(self) -> Said:
        if self.dies_at == BEHIND:
            self._die()
        time.sleep(self.stall_s)  # a process that stops behind its line is what is tested
        return super()._hear()

    def share(self, report: RankReport) -> list[RankReport]:
        reports = super().share(report)
        if self.dies_at == AFTER:
            self._die()
        return reports
