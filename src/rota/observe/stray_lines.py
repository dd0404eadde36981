"""Stray lines reach stderr past the log, from C code, other libraries or child processes; here they join the log."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

STDERR = 2
_READ_BYTES = 65_536


@contextmanager
def stray_lines(tell: Callable[[str], None]) -> Iterator[TextIO]:
    """Inside the `with` block a thread calls `tell` with every line on stderr; yields the former stderr.

    Descriptor 2 itself is a pipe, so every line of this process and its children goes through it.
    """
    sys.stderr.flush()
    before = os.dup(STDERR)
    outlet, inlet = os.pipe()
    os.dup2(inlet, STDERR)
    os.close(inlet)
    # A child may keep its end of the pipe open for longer: the reader cannot wait for the end of the file.
    wake, bell = os.pipe()
    reader = threading.Thread(target=_read, args=(outlet, wake, tell), name="rota-stray-lines", daemon=True)
    reader.start()
    try:
        with open(before, "w", encoding="utf-8", errors="backslashreplace", closefd=False) as stream:
            yield stream
    finally:
        sys.stderr.flush()
        os.dup2(before, STDERR)
        os.close(bell)
        reader.join()
        for descriptor in (before, outlet, wake):
            os.close(descriptor)


def _read(outlet: int, wake: int, tell: Callable[[str], None]) -> None:
    poll = select.poll()
    poll.register(outlet, select.POLLIN)
    poll.register(wake, select.POLLIN)
    rest = b""
    # The loop ends when it is woken with nothing left to read, or when all writers have closed the pipe.
    while outlet in dict(poll.poll()) and (read := os.read(outlet, _READ_BYTES)):
        *lines, rest = (rest + read).split(b"\n")
        # A progress bar returns to the beginning of its line; its last state is enough.
        rest = rest.rpartition(b"\r")[2]
        for line in lines:
            _tell(line, tell)
    _tell(rest, tell)


def _tell(line: bytes, tell: Callable[[str], None]) -> None:
    text = line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
    if text.strip():
        with suppress(Exception):  # a line that cannot be told is lost: a reader that stops would block the writers
            tell(text)
