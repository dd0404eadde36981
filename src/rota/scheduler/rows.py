"""The row ledger knows which of the device's rows are taken."""

from __future__ import annotations

import heapq

from rota.core.ids import Row


class RowLedger:
    """Hands out the lowest free row, so that a rerun hands out the same rows."""

    def __init__(self, rows: int) -> None:
        self.total = rows
        self._free = [Row(row) for row in range(rows)]

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> Row:
        return heapq.heappop(self._free)

    def give_back(self, row: Row) -> None:
        heapq.heappush(self._free, row)
