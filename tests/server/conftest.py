"""A busy machine refuses no grammar here, and a client reads one certificate instead of all of the machine's."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rota.runtime.children import freeze_heap
from rota.server.calls import reading_room
from tests.fakes import FakeDevice
from tests.server.letters import letters_device
from tests.waiting import TIMEOUT_S


@pytest.fixture(autouse=True, scope="package")
def _certificates_are_few() -> Iterator[None]:
    """Without TLS nobody needs them, and to read all takes longer than all else that a client does here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(Path(__file__).parent / "certificates" / "first.crt"))
        yield


@pytest.fixture(autouse=True, scope="package")
def _checks_may_wait_for_their_turn() -> Iterator[None]:
    """Only processor time is limited, unless a test says otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TEXT", "GRAMMAR"):
            patch.setattr(reading_room, name, replace(getattr(reading_room, name), wall_s=TIMEOUT_S))
        yield


@pytest.fixture
def frozen_heap() -> Iterator[None]:
    """As in a server. A collection would visit all objects of the test run meanwhile."""
    freeze_heap()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def device() -> FakeDevice:
    """The device behind a file's server of letters."""
    return letters_device()
