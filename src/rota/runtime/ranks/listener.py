"""The leader listens to its followers in a thread: what they say of adapters, and whether they are still there."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from rota.core.capacity import Capacity
from rota.core.errors import EngineDiedError
from rota.runtime.last_words import EndWith
from rota.runtime.patience import Patience, Silence
from rota.runtime.pulse import BEAT_S
from rota.runtime.ranks.agreement import Agreement
from rota.runtime.ranks.meeting import Socket
from rota.runtime.ranks.processes import FollowerProcesses
from rota.runtime.wire import Alive, Building, Failed, Ready, decode

# A process that ended may have left its last words in the socket.
_LOOK_S, _LATE_S = 0.2, 0.05
_KILLED_S = 0.3
# A device that fails because another rank is gone fails at once, and the thread below hears why a moment later.
_REASON_S = 2.0


class Listener:
    """Owns the socket of reports. `end` is called in its thread, with the reason why the ranks cannot go on."""

    def __init__(
        self,
        socket: Socket,
        names: Mapping[bytes, int],
        agreement: Agreement,
        processes: FollowerProcesses,
        end: EndWith,
        patience: Patience,
    ) -> None:
        self._socket = socket
        self._names = names
        self._agreement = agreement
        self._processes = processes
        self._end = end
        self._silences = {rank: Silence(patience) for rank in names.values()}
        self._capacities: dict[int, Capacity] = {}
        self._changed = threading.Condition()
        self._lost = ""
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="rota-ranks", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def capacities(self) -> dict[int, Capacity]:
        """What the followers can hold; waits until all have built. A follower that takes too long is lost."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost or len(self._capacities) == len(self._silences))
        self.check()
        return self._capacities

    def check(self, wait_s: float = 0.0) -> None:
        """Raise if a follower is lost."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._lost), wait_s)
        if self._lost:
            raise EngineDiedError(self._lost)

    def check_after_failure(self) -> None:
        """As `check`, when the device has failed: a follower that is lost is the better reason."""
        self.check(_REASON_S)

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join()

    def _listen(self) -> None:
        while not self._is_closing.is_set() and not self._lost:
            complaint = self._processes.complaint()
            self._hear_all(_LATE_S if complaint else _LOOK_S)
            complaint = complaint or self._silent()
            if complaint and not self._is_closing.is_set():
                self._lose(complaint)
        self._socket.close()

    def _hear_all(self, wait_s: float) -> None:
        began_at = time.monotonic()
        while self._socket.poll(int(wait_s * 1000.0)):
            name, packet = self._socket.recv_multipart()
            if name in self._names:
                self._hear(self._names[name], decode(packet))
            wait_s = 0.0
        for silence in self._silences.values():
            silence.spend(min(_LOOK_S, time.monotonic() - began_at))

    def _hear(self, rank: int, records: list[Any]) -> None:
        self._silences[rank].hear(records)
        for record in records:
            match record:
                case Ready(capacity):
                    with self._changed:
                        self._capacities[rank] = capacity
                        self._changed.notify_all()
                case Failed(reason):
                    # A rank that is killed makes those fail that compute with it, and they may be heard first.
                    self._lose(self._processes.killed(_KILLED_S) or f"Rank {rank}: {reason}")
                case Building() | Alive():
                    pass
                case message:
                    self._agreement.note(rank, message)

    def _silent(self) -> str:
        """A rank that hangs makes those wait that compute with it, so all silent ranks are named."""
        complaint = next(filter(None, (silence.complaint for silence in self._silences.values())), "")
        if not complaint:
            return ""
        silent = [str(rank) for rank, silence in self._silences.items() if silence.left_s < 2 * BEAT_S]
        return f"No word from rank {' and '.join(silent)}. {complaint}"

    def _lose(self, reason: str) -> None:
        if self._lost or self._is_closing.is_set():
            return
        with self._changed:
            self._lost = reason
            self._changed.notify_all()
        self._processes.kill()  # else a device that waits for a rank that hangs would wait for ever
        self._end(reason)
