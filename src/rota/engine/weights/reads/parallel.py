"""Parallel reads copy tensors to the device while threads read those that come next."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor

from rota.core.errors import ModelError
from rota.engine.parallel.shard import Cut
from rota.engine.weights.reads.ring import Copier, FileRange, Ring, RingPiece, RingSetup, cut_into_runs


class Copies(Protocol):
    """Where tensors are copied from."""

    def copy(self, name: str, target: Tensor, cut: Cut | None = None) -> None:
        """Copy a checked tensor, or a stretch of it, into the target, to its device and precision."""
        ...


class ParallelReads:
    """Tensors that have a place are read ahead, in the order of the places. All others are copied from elsewhere.

    The thread that asks for tensors is the one that starts the copies: it has allocated the target, and whatever it
    computes next on the device comes behind the copy.
    """

    def __init__(
        self,
        places: Mapping[str, FileRange],
        copier: Copier,
        setup: RingSetup,
        elsewhere: Copies,
    ) -> None:
        self._places = places
        self._copier = copier
        self._elsewhere = elsewhere
        self._ring = Ring(cut_into_runs(places, setup.buffer_bytes), copier, setup)
        self._stack = ExitStack()
        self._coming = deque(places)
        # The run that is being copied: its buffer, and the pieces that are left.
        self._buffer: Tensor | None = None
        self._pieces: deque[RingPiece] = deque()

    def __enter__(self) -> Self:
        with self._stack:
            # The threads end first, then their buffers go.
            self._stack.enter_context(self._copier)
            self._stack.enter_context(self._ring)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._buffer = None
        self._stack.__exit__(kind, error, trace)

    def copy(self, name: str, target: Tensor, cut: Cut | None = None) -> None:
        """A tensor that is asked for out of turn comes from elsewhere too: slow, but never wrong."""
        if not self._coming or self._coming[0] != name or not target.is_contiguous():
            self._elsewhere.copy(name, target, cut)
            return
        self._coming.popleft()
        try:
            self._copy_pieces(target.view(-1), self._places[name].dtype)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ModelError(f"The tensor '{name}' cannot be copied to {target.device}: {error}.") from error

    def _copy_pieces(self, target: Tensor, stored_as: torch.dtype) -> None:
        done = 0
        while done < len(target):
            if self._buffer is None:
                run, self._buffer = self._ring.take()
                self._pieces.extend(run)
            piece = self._pieces.popleft()
            numbers = self._buffer[piece.at : piece.at + piece.size].view(stored_as)
            self._copier.copy(numbers, target[done : done + len(numbers)])
            done += len(numbers)
            if not self._pieces:
                self._ring.give_back(self._buffer, self._copier.mark())
                self._buffer = None
