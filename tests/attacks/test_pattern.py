"""Attack 1: an adapter whose patterns never end to be matched."""

from __future__ import annotations

import time

import pytest

from tests.attacks.live import neighbour, serving, with_config

BOMB = "([a-z0-9_.]+)+!"
BOMBS = {
    "target_modules": {"target_modules": BOMB},
    "rank_pattern": {"rank_pattern": {BOMB: 4}},
    "alpha_pattern": {"alpha_pattern": {BOMB: 4}},
    "layers_pattern": {"layers_to_transform": [0], "layers_pattern": BOMB},
}


@pytest.mark.parametrize(
    "fields",
    [
        ["target_modules"],
        pytest.param(list(BOMBS), marks=pytest.mark.long("each pattern takes the reading room its whole time limit")),
    ],
    ids=["one", "every"],
)
def test_a_pattern_without_an_end_is_refused_and_nobody_notices(tmp_path, record_property, fields):
    with serving(tmp_path) as server:
        for name in fields:
            with_config(server.acme.root / name, **BOMBS[name])
        pid = server.boss.client.get("/server_info").json()["replicas"][0]["pid"]
        with neighbour(server) as gaps:
            began_at = time.monotonic()
            answers = {name: server.acme.put(f"acme-{name}", name) for name in fields}
            took_s = time.monotonic() - began_at
        record_property("gaps", f"{gaps}; {took_s / len(fields):.2f} s each")

        for name, answer in answers.items():
            assert answer.status_code == 400, (name, answer.text)
            assert "Make the patterns of its adapter_config.json simpler." in answer.json()["error"]["message"]
        assert not gaps.problems
        assert server.boss.client.get("/server_info").json()["replicas"][0]["pid"] == pid, "no engine died"
