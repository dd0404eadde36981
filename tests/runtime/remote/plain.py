"""The same line without keys, for the test that shows what a capture would hold then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import zmq

from rota.runtime.cluster import line
from tests.fakes import FakeDevice


def listen(socket: zmq.Socket[bytes], _: line.KeyPair, host: str) -> str:
    socket.bind(f"tcp://{host}:*")
    return socket.get_string(zmq.LAST_ENDPOINT)


def connect(socket: zmq.Socket[bytes], _: line.KeyPair, address: str, __: str) -> None:
    socket.connect(address)


def speak_plainly(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(line, "listen", listen)
    patch.setattr(line, "connect", connect)


def arrive() -> PlainDevice:
    """In another process: it opens its line after it has got what builds its device."""
    speak_plainly(pytest.MonkeyPatch())
    return PlainDevice()


class PlainDevice:
    """Builds a device, and takes the keys out of every process that it is sent to."""

    def __call__(self) -> FakeDevice:
        return FakeDevice()

    def __reduce__(self) -> tuple[Callable[[], PlainDevice], tuple[()]]:
        return arrive, ()
