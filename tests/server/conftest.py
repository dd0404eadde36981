"""A busy machine refuses no grammar here: only processor time is limited, unless a test says otherwise."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from rota.runtime.heap import freeze_heap
from tests.server.patient_checks import checks_within
from tests.waiting import PATIENCE_S


@pytest.fixture(autouse=True, scope="package")
def _checks_may_wait_for_their_turn() -> Iterator[None]:
    with checks_within(limit_s=PATIENCE_S, stuck_s=2 * PATIENCE_S):
        yield


@pytest.fixture
def frozen_heap() -> Iterator[None]:
    """As in a server. A collection would visit all objects of the test run meanwhile."""
    freeze_heap()
    yield
    gc.unfreeze()
