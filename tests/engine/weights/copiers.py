"""Copiers without a GPU: one that copies at once, and one that copies as late as it may."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from rota.engine.weights.read_ahead import Wait


class PlainCopier:
    """Knows how many buffers it has made and not yet got back, and how many bytes it has copied."""

    def __init__(self) -> None:
        self.buffers = 0
        self.most_buffers = 0
        self.copied_bytes = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.buffers = 0

    def buffer(self, size: int) -> Tensor:
        with self._lock:
            self.buffers += 1
            self.most_buffers = max(self.most_buffers, self.buffers)
        return torch.full((size,), 255, dtype=torch.uint8)  # in any precision NaN

    def copy(self, source: Tensor, target: Tensor) -> None:
        self.copied_bytes += source.nbytes
        target.copy_(source)

    def mark(self) -> Wait:
        return lambda: None


class LateCopier(PlainCopier):
    """Copies only when someone waits for it: a buffer that is read into too early gives wrong numbers."""

    def __init__(self) -> None:
        super().__init__()
        self._queued: list[Callable[[], object]] = []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._carry_out()
        super().__exit__(kind, error, trace)

    def copy(self, source: Tensor, target: Tensor) -> None:
        self._queued.append(lambda: target.copy_(source))

    def mark(self) -> Wait:
        return self._carry_out

    def _carry_out(self) -> None:
        with self._lock:
            while self._queued:
                self._queued.pop(0)()


class FailingCopier(PlainCopier):
    """Fails where it is told to, the second time."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where
        self._calls = 0

    def buffer(self, size: int) -> Tensor:
        self._step("buffer")
        return super().buffer(size)

    def copy(self, source: Tensor, target: Tensor) -> None:
        self._step("copy")
        super().copy(source, target)

    def mark(self) -> Wait:
        return lambda: self._step("wait")

    def _step(self, where: str) -> None:
        self._calls += where == self._where
        if where == self._where and self._calls > 1:
            raise RuntimeError(f"CUDA error: no {where}")
