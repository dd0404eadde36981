"""A busy machine refuses no grammar here, and a client reads one certificate instead of all of the machine's."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from rota.runtime.heap import freeze_heap
from tests.server.patient_checks import checks_within
from tests.waiting import PATIENCE_S


@pytest.fixture(autouse=True, scope="package")
def _certificates_are_few() -> Iterator[None]:
    """Without TLS nobody needs them, and to read all takes longer than all else that a client does here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(Path(__file__).parent / "certificates" / "first.crt"))
        yield


@pytest.fixture(autouse=True, scope="package")
def _checks_may_wait_for_their_turn() -> Iterator[None]:
    """Only processor time is limited, unless a test says otherwise."""
    with checks_within(limit_s=PATIENCE_S, stuck_s=2 * PATIENCE_S):
        yield


@pytest.fixture
def frozen_heap() -> Iterator[None]:
    """As in a server. A collection would visit all objects of the test run meanwhile."""
    freeze_heap()
    yield
    gc.unfreeze()
