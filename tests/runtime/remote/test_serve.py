"""What an invited machine runs ends with its engine, and an engine ends with its front."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import pytest
import zmq

from rota.core.config import EngineConfig
from rota.core.errors import EngineDiedError
from rota.runtime.cluster.line import GuardedLine
from rota.runtime.cluster.records import Invitation, Joined
from rota.runtime.cluster.remote_engine import LINE_LOST, RemoteEngine, run_invited
from rota.runtime.supervisor import SupervisedService
from rota.runtime.wire import Ready, receive_all
from tests.fakes import FakeDevice
from tests.processes import is_alive
from tests.runtime.remote.elsewhere import HOST, NearElsewhere
from tests.runtime.services import Listener
from tests.waiting import TIMEOUT_S

NOT_HERE = "203.0.113.1"  # an address for documentation, which no machine has


@contextmanager
def front_line():
    context = zmq.Context()
    line = GuardedLine(context, on_lost=lambda: None)
    try:
        yield line
    finally:
        line.close()
        context.destroy(linger=0)


def test_an_engine_ends_when_its_front_is_gone():
    elsewhere = NearElsewhere(FakeDevice, EngineConfig())

    def on_joined(line: GuardedLine, joined: Joined) -> None:
        line.expect(joined.engine_key)
        line.connect(joined.messages, joined.engine_key)

    with front_line() as line:
        elsewhere.start(Invitation(line.listen(HOST), line.public_key), partial(on_joined, line))
        assert line.inbox.poll(TIMEOUT_S * 1000.0)
        assert isinstance(receive_all(line.inbox)[0], Ready)

    elsewhere.join(TIMEOUT_S)
    assert elsewhere.exitcode == LINE_LOST
    assert not is_alive(elsewhere.joined.pid)


def test_an_engine_that_cannot_listen_ends_and_has_not_joined(capfd):
    told = run_invited(FakeDevice, EngineConfig(), Invitation("tcp://127.0.0.1:9", "k"), NOT_HERE)

    assert list(told) == [1]
    assert f"No port could be taken at {NOT_HERE}" in capfd.readouterr().err


def test_a_front_that_cannot_listen_says_so():
    def new_engine(context, build_device, config):
        return RemoteEngine(context, NearElsewhere(build_device, config), NOT_HERE)

    service = SupervisedService(FakeDevice, EngineConfig(), new_engine=new_engine)
    service.start(Listener())
    with pytest.raises(EngineDiedError, match=f"No port could be taken at {NOT_HERE}"):
        service.wait_until_ready()
    service.stop()
