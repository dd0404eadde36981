"""The engine's reading room: what the files of adapters say is understood in a process that can be ended."""

from __future__ import annotations

from rota.core.errors import AdapterError, BusyError
from rota.engine.lora.files.outline import answer
from rota.runtime.room.job import JobOutcome, Kind, QueueBounds
from rota.runtime.room.room import FullError, Room


def understand(_tools: object, question: bytes) -> bytes:
    return answer(question)


# An adapter of every expert of a large model takes a fifth of this. By the clock it has longer.
# Those of a start wait together, each for a thread.
ADAPTER = Kind(
    work=understand,
    wall_s=20.0,
    cpu_s=1.0,
    memory_bytes=1 << 30,
    of_key=QueueBounds(64, 1 << 30),
    of_all=QueueBounds(256, 2 << 30),
)


class AdapterRoom(Room):
    """From any thread. A process is on the machine whose disk is read."""

    def __init__(self) -> None:
        super().__init__(_prepare)

    def ask(self, question: bytes, key: str = "") -> bytes:
        """Raises AdapterError. A process that was killed from outside is asked again."""
        for _ in range(2):
            try:
                reply = self.submit(key, ADAPTER, question).result()
            except FullError:
                raise BusyError("Too many adapters wait to be read; try again in a second.") from None
            if reply.outcome is not JobOutcome.DIED:
                break
        match reply.outcome:
            case JobOutcome.DONE:
                return reply.content
            case JobOutcome.TOO_LONG:
                raise AdapterError(
                    f"The adapter's config and headers took more than {ADAPTER.cpu_s:g} second of processor time to "
                    "read. Make the patterns of its adapter_config.json simpler."
                )
            case JobOutcome.TOO_LARGE:
                raise AdapterError("The adapter's config and headers take too much memory to read.")
            case JobOutcome.FAILED:
                raise RuntimeError(reply.content.decode())
            case JobOutcome.OVERDUE:
                raise BusyError("The machine is too busy to read the adapter's config; load the adapter again.")
            case _:
                raise BusyError("The process that reads adapters ended; load the adapter again.")


def _prepare(_: None) -> None:
    """Nothing is at hand but this module."""
