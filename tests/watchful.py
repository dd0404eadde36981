"""A device of integers that notes which version of an adapter gave each token, and whose KV each request read."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from rota.core.ids import AdapterId, RequestId, Row
from rota.core.plan import Seat
from tests.fakes import FakeDevice


@dataclass
class WatchfulDevice(FakeDevice):
    """Notes which version gave each token, and which requests read KV of another version than their own."""

    makers: defaultdict[RequestId, list[AdapterId]] = field(default_factory=lambda: defaultdict(list))
    mixed: set[RequestId] = field(default_factory=set)
    _seated: dict[Row, RequestId] = field(default_factory=dict)

    def _sit_down(self, seat: Seat) -> None:
        super()._sit_down(seat)
        self._seated[seat.row] = seat.request_id

    def _sample(self, row: Row, end: int) -> int:
        self.makers[self._seated[row]].append(self._rows[row].adapter_id)
        return super()._sample(row, end)

    def _read(self, row: Row, start: int, end: int) -> list[int]:
        found = [self._kv[self._slot(row, position)] for position in range(max(0, start), end)]
        if any(adapter != self._rows[row].adapter_id for adapter, _ in found):
            self.mixed.add(self._seated[row])
        return [token for _, token in found]
