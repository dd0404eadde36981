from __future__ import annotations

import pytest

from rota.commands.logged import build_logged
from rota.core.config import EngineConfig, ServerConfig
from rota.engine.progress import Progress, tracked
from rota.start import START
from tests.fakes import FakeDevice


@pytest.fixture
def told(monkeypatch) -> list[str]:
    """What reaches the supervisor's side of this process; the listener is as before afterwards."""
    heard: list[str] = []
    monkeypatch.setattr(START, "tell_progress", heard.append)
    return heard


def test_all_long_work_of_a_start_reaches_the_supervisor_also_if_it_shows_no_bar(told, monkeypatch):
    monkeypatch.setattr("rota.commands.logged.set_up_logs", lambda *_: None)

    def make_device(_: EngineConfig) -> FakeDevice:
        with Progress("Loading", 2, is_quiet=True) as progress:
            progress.update()
        list(tracked([1, 2], "Capturing", is_quiet=True))
        START.tell_progress("Warming up")
        return FakeDevice()

    build_logged(make_device, EngineConfig(), ServerConfig())

    assert told == ["Loading", "Capturing", "Capturing", "Warming up"]
