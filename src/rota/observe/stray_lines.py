"""Stray lines are written to stderr past the log: by C code, other libraries or child processes; here they join it."""

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
    """While it lasts, `tell` hears every line on stderr, from a thread; gives the stream that stderr was.

    Descriptor 2 itself leads to a pipe, so nothing that this process or its children write can pass by.
    """
    sys.stderr.flush()
    before = os.dup(STDERR)
    outlet, inlet = os.pipe()
    os.dup2(inlet, STDERR)
    os.close(inlet)
    # A child may keep its end of the pipe open for longer: whoever reads cannot wait for the end of the file.
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
    # Woken with nothing left to be read, or with nobody left to write, it ends.
    while outlet in dict(poll.poll()) and (read := os.read(outlet, _READ_BYTES)):
        *lines, rest = (rest + read).split(b"\n")
        # A progress bar goes back to the beginning of its line; the last it drew is enough.
        rest = rest.rpartition(b"\r")[2]
        for line in lines:
            _tell(line, tell)
    _tell(rest, tell)


def _tell(line: bytes, tell: Callable[[str], None]) -> None:
    text = line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
    if text.strip():
        with suppress(Exception):  # what cannot be told is lost; a pipe that is not read would hold up its writers
            tell(text)
