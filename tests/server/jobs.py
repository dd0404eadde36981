"""Jobs for worker processes, in a module of their own: a worker imports it, and that must be quick."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from rota.server.prompts import Texts


def echo(_: Texts, raw: bytes) -> tuple[int, bytes]:
    """A job that says which process did it."""
    return os.getpid(), raw


def hangs(_: Texts, raw: bytes) -> None:
    """A job that tells in a file that it began, and does not end."""
    Path(raw.decode()).touch()
    threading.Event().wait()


def takes_memory(_: Texts, raw: bytes) -> int:
    return len(bytes(int(raw)))


def fails(_: Texts, raw: bytes) -> None:
    raise ZeroDivisionError(raw.decode())
