"""A copier owns the buffers that files are read into, and copies from them to the device."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from torch import Tensor

# Returns when the copies that it was made behind are complete.
Wait = Callable[[], None]


class Copier(Protocol):
    """The end of the `with` block gives all buffers back."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def buffer(self, size: int) -> Tensor:
        """[size] uint8 in host memory; from any thread."""
        ...

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Start to copy a part of a buffer into a tensor of as many numbers, in the target's precision."""
        ...

    def mark(self) -> Wait:
        """What waits, in any thread, for all copies that were started so far."""
        ...
