from __future__ import annotations

import pytest
import zmq

from rota.core.config import EngineConfig
from rota.runtime.process import EngineProcess
from tests.fakes import FakeDevice


def test_an_engine_whose_sockets_find_no_place_leaves_no_folder(monkeypatch, tmp_path):
    place = tmp_path / ("deep" * 30)  # more characters than the path of a socket may have
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    context = zmq.Context()

    with pytest.raises(zmq.ZMQError):
        EngineProcess(context, FakeDevice, EngineConfig())

    assert list(place.iterdir()) == []
    context.destroy(linger=0)
