"""A pending copy is an adapter's copy into a slot, from its order on: a step that uses the slot waits for it.

    host      order A    plan and submit the next step
    copies               | A          |
    device    | step     | step       | step with A |      the third step's stream waits for A's event

The step waits on the device, so the host goes on at once. Before that the host makes sure that the copy is queued: a
stream that waits for an event that was never recorded does not wait at all.
"""

from __future__ import annotations

import threading

import torch


class PendingCopy:
    """One thread queues the copy, or says that it failed; another thread lets steps wait for it."""

    def __init__(self) -> None:
        self._is_queued = threading.Event()
        self._is_complete: torch.cuda.Event | None = None
        self._has_failed = False

    @property
    def has_failed(self) -> bool:
        """Does the slot hold nothing? True only after `fail`."""
        return self._has_failed

    def queue(self, is_complete: torch.cuda.Event | None) -> None:
        """The copy is queued, and `is_complete` is recorded behind it; without an event it is complete."""
        self._is_complete = is_complete
        self._is_queued.set()

    def fail(self, is_complete: torch.cuda.Event | None) -> None:
        """As `queue`, but the slot was emptied, since the adapter could not be copied."""
        self._has_failed = True
        self.queue(is_complete)

    def wait(self) -> None:
        """Let the current stream wait for the copy. This thread waits until the copy is queued, on a CPU until its end.

        A copy is queued at once if its adapter is in host memory, so this thread hardly ever waits on a GPU.
        """
        self._is_queued.wait()
        if self._is_complete is not None:
            self._is_complete.wait()
