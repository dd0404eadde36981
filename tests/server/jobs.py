"""Jobs for the reading room, in a module of their own: its processes import it, and that must be quick."""

from __future__ import annotations

import os
from pathlib import Path

from rota.server.calls.prompts import Texts


def echo(_: Texts, raw: bytes) -> tuple[int, bytes]:
    """A job that says whose copy did it."""
    return os.getppid(), raw


def hangs(_: Texts, raw: bytes) -> None:
    """A job that begins to read from a pipe, which has a name, and does not end while nobody has written to it."""
    Path(raw.decode()).read_bytes()


def takes_memory(_: Texts, raw: bytes) -> int:
    return len(bytes(int(raw)))


def fails(_: Texts, raw: bytes) -> None:
    raise ZeroDivisionError(raw.decode())
