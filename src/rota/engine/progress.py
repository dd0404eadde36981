"""Progress shows how far long work has come: a bar on a terminal, elsewhere a plain line every ten seconds.

It lives in the engine because the engine loads weights, and because the packages below must not read a clock.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, TextIO, TypeVar

from rich.filesize import decimal
from tqdm import tqdm

from rota.start import START

LINE_EVERY_S = 10.0
BYTES = "B"

Item = TypeVar("Item")


class Progress:
    """Counts up to `total`; work that ends before the first line is due prints none."""

    def __init__(
        self,
        title: str,
        total: int,
        unit: str = "",
        is_quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title, self._total, self._unit = title, total, unit
        self._stream = stream or sys.stderr
        self._clock, self._is_quiet = clock, is_quiet
        self._done = 0
        self._told = 0  # what the last line said
        self._line_at = clock() + LINE_EVERY_S
        self._bar = None if is_quiet or not self._stream.isatty() else self._make_bar()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._told or self._is_line_due():
            self._tell()

    def update(self, more: int = 1) -> None:
        """`more` units are done."""
        self._done += more
        START.tell_progress(self._title)
        if self._bar is not None:
            self._bar.update(more)
        elif self._is_line_due():
            self._tell()

    def _is_line_due(self) -> bool:
        return not self._is_quiet and self._clock() >= self._line_at

    def _tell(self) -> None:
        """Never prints the same line twice."""
        if self._done == self._told:
            return
        self._told = self._done
        self._line_at = self._clock() + LINE_EVERY_S
        print(f"{self._title}: {self._amount()}", file=self._stream, flush=True)

    def _amount(self) -> str:
        if self._unit == BYTES:
            return f"{decimal(self._done)} of {decimal(self._total)}"
        return f"{self._done:,} of {self._total:,} {self._unit}".rstrip()

    def _make_bar(self) -> Any:
        # Its own lock is one between processes: a semaphore that stays behind where a process is ended.
        tqdm.set_lock(threading.RLock())
        is_bytes = self._unit == BYTES
        unit = BYTES if is_bytes else f" {self._unit}" if self._unit else "it"
        return tqdm(desc=self._title, total=self._total, unit=unit, unit_scale=is_bytes, leave=False, file=self._stream)


def tracked(items: Sequence[Item], title: str, unit: str = "", is_quiet: bool = False) -> Iterator[Item]:
    """The same items one by one; each is counted when the next is taken."""
    with Progress(title, len(items), unit, is_quiet) as progress:
        for item in items:
            yield item
            progress.update()
