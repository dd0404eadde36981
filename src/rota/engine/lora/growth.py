"""Growth: slots get room for more than plain factors with the first adapter that needs it, if the device has memory.

reader's thread    reads the adapter, and wants what it needs
engine's thread    before its next plan: the bank grows, graphs with adapters are captured anew
scheduler          orders the adapter's copy in a later plan
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rota.core.adapter import Extra

NAMES = {
    Extra.GAIN_BIAS: "DoRA or biases",
    Extra.EMBEDDING: "factors of the embedding",
    Extra.HEAD: "factors of the head",
}


class SlotGrowth:
    """What slots have besides factors in the layers, and what they are to get; from any thread."""

    def __init__(self, extras: Extra, bytes_for: Callable[[Extra], int], free: Callable[[], int]) -> None:
        """`bytes_for` says what all slots take with these extras, `free` what the device has left."""
        self._has = self._wanted = extras
        self._bytes_for, self._free = bytes_for, free
        self._lock = threading.Lock()

    def refusal(self, extras: Extra) -> str:
        """Why slots cannot have these extras; empty if they can."""
        with self._lock:
            had = self._has | self._wanted
        needed, free = self._bytes_for(had | extras) - self._bytes_for(had), self._free()
        if needed <= free:
            return ""
        what = " and ".join(name for extra, name in NAMES.items() if extra in extras & ~had)
        return (
            f"needs {needed:,} bytes on the device for {what} in all slots, and {free:,} are free; start the server "
            "with this adapter among its --lora-paths."
        )

    def want(self, extras: Extra) -> None:
        """An adapter was read that has these."""
        with self._lock:
            self._wanted |= extras

    def due(self) -> Extra:
        """What slots are to get now."""
        with self._lock:
            return self._wanted & ~self._has

    def end(self, has_grown: bool) -> None:
        """Slots have what was due, or it could not be had."""
        with self._lock:
            if has_grown:
                self._has = self._wanted
            else:
                self._wanted = self._has
