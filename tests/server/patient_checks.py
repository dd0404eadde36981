"""Processes that check grammars and give a check as much time as a test says, however busy the machine is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from rota.server.grammar_checks import copies, process
from rota.server.grammar_checks.worker import check_main


def patient_main(limit_s: float, connection: Connection, folder: Path) -> None:
    """What a process does; processor time is limited as always."""
    copies.LIMIT_S = limit_s
    check_main(connection, folder)


@contextmanager
def checks_within(limit_s: float, stuck_s: float) -> Iterator[None]:
    """Meanwhile a check may take so long, and a process is given up after so long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "check_main", partial(patient_main, limit_s))
        patch.setattr(process, "STUCK_S", stuck_s)
        yield
