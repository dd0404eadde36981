"""Groups of rank processes, one of each size for all tests here: to start a process takes longer than most tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.engine.parallel.ranks import Ranks, started_ranks


@pytest.fixture(scope="package")
def group_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Ranks]]:
    """Ranks by their number; started when they are first asked for."""
    started: dict[int, Ranks] = {}
    with ExitStack() as stack:

        def group(size: int) -> Ranks:
            if size not in started:
                started[size] = stack.enter_context(started_ranks(size, tmp_path_factory.mktemp(f"ranks{size}")))
            return started[size]

        yield group
