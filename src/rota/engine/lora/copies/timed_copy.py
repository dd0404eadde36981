"""A timed copy is work on the copies' own stream, between two events that tell how long it took."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

import torch


class TimedCopy:
    """What runs inside `with` is queued on the stream behind `is_free`. A CPU has no stream: it has copied at the end.

    `is_complete` is recorded behind the work, also if an error ended it.
    """

    def __init__(self, stream: torch.cuda.Stream | None, is_free: torch.cuda.Event | None = None) -> None:
        self.is_complete: torch.cuda.Event | None = None
        self._is_free = is_free
        self._begun_at = self._ended_at = 0.0
        if stream is not None:
            self._on_stream = torch.cuda.stream(stream)
            # Blocking: the thread that waits sleeps, instead of spinning beside the thread that launches steps.
            self._begins, self.is_complete = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))

    def __enter__(self) -> Self:
        if self.is_complete is not None:
            self._on_stream.__enter__()
            if self._is_free is not None:
                self._is_free.wait()
            self._begins.record()
        self._begun_at = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended_at = time.perf_counter()
        if self.is_complete is not None:
            self.is_complete.record()
            self._on_stream.__exit__(kind, error, trace)

    def wait(self) -> float:
        """Blocks until the work is done, and gives its seconds on the device."""
        if self.is_complete is None:
            return self._ended_at - self._begun_at
        self.is_complete.synchronize()
        return self._begins.elapsed_time(self.is_complete) / 1e3
