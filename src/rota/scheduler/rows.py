"""The row ledger knows which of the device's rows are taken, and which of these are parked."""

from __future__ import annotations

import heapq

from rota.core.ids import AdapterId, Row


class RowLedger:
    """Hands out the lowest free row, so that a rerun hands out the same rows.

    A parked sequence keeps its row until another sequence needs a row, so a turn that comes soon costs nothing.
    """

    def __init__(self, rows: int) -> None:
        self.total = rows
        self._free = [Row(row) for row in range(rows)]
        self._parked: dict[AdapterId, int] = {}  # by adapter, in the order in which the adapters lost their slots
        self._parked_rows = 0

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def available(self) -> int:
        """Rows that a sequence may take now: free ones, and those of parked sequences."""
        return len(self._free) + self._parked_rows

    @property
    def in_use(self) -> int:
        """Rows of sequences that run, and of those whose adapter is on its way into a slot."""
        return self.total - self.available

    def take(self) -> Row:
        return heapq.heappop(self._free)

    def give_back(self, row: Row) -> None:
        heapq.heappush(self._free, row)

    def note_parked(self, adapter_id: AdapterId, rows: int) -> None:
        """So many rows belong to sequences of an adapter that has no slot; 0 if the adapter has one."""
        before = self._parked.get(adapter_id, 0)
        if rows == before:
            return
        self._parked_rows += rows - before
        if rows:
            self._parked[adapter_id] = rows
        else:
            del self._parked[adapter_id]

    def first_to_give(self) -> AdapterId:
        """The adapter whose parked sequences give up a row: the last that lost its slot, since its turn comes last."""
        return next(reversed(self._parked))
