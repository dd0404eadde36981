from __future__ import annotations

import json
import threading
import time

import httpx
import pytest

from rota.cli import main
from rota.commands.demo import DemoTraffic
from tests.dashboard.stage import NAMES, stage
from tests.waiting import TIMEOUT_S


def demo_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rota-demo")]


def test_its_traffic_asks_for_every_adapter_and_the_base_model_until_stopped(tmp_path):
    with stage(tmp_path, step_s=0.001) as made:
        traffic = DemoTraffic(rate=200.0)
        traffic.start(made.url)
        asked: set[str] = set()
        ends_at = time.monotonic() + TIMEOUT_S
        with httpx.stream("GET", f"{made.url}/dashboard/events") as reply:
            for line in reply.iter_lines():
                if line.startswith("data: "):
                    rows = json.loads(line.removeprefix("data: "))["adapters"]
                    asked.update(row["name"] for row in rows if row["ttft"]["p50"] is not None)
                if asked == {"letters", *NAMES} or time.monotonic() > ends_at:
                    break
        made.service.stop()
        traffic.stop()

    assert asked == {"letters", *NAMES}
    assert demo_threads() == []


def test_a_rate_that_makes_no_sense_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--rate", "0"])

    assert ended.value.code == 2
    assert "rate must lie above 0" in capsys.readouterr().err
