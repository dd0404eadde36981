from __future__ import annotations

import pytest

from rota.commands.logged import build_logged
from rota.core.config import EngineConfig, ServerConfig
from rota.engine import progress as engine_progress
from rota.engine.progress import Progress, tell_progress, tracked
from rota.runtime import start as runtime_progress
from rota.runtime.start import listen_for_progress
from tests.fakes import FakeDevice


@pytest.fixture
def told(monkeypatch) -> list[str]:
    """What reaches the supervisor's side of this process; the listeners are as before afterwards."""
    for module in (engine_progress, runtime_progress):
        monkeypatch.setattr(module, "_listeners", [])
    heard: list[str] = []
    listen_for_progress(heard.append)
    return heard


def test_all_long_work_of_a_start_reaches_the_supervisor_also_if_it_shows_no_bar(told, monkeypatch):
    monkeypatch.setattr("rota.commands.logged.set_up_logs", lambda *_: None)

    def make_device(_: EngineConfig) -> FakeDevice:
        with Progress("Loading", 2, is_quiet=True) as progress:
            progress.update()
        list(tracked([1, 2], "Capturing", is_quiet=True))
        tell_progress("Warming up")
        return FakeDevice()

    build_logged(make_device, EngineConfig(), ServerConfig())

    assert told == ["Loading", "Capturing", "Capturing", "Warming up"]
