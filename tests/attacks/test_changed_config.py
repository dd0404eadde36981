"""Attack 2: a good folder is loaded, its config becomes a pattern without an end, and the engine is started again."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.attacks.live import good_adapter, neighbour, serving
from tests.attacks.test_pattern import BOMB
from tests.waiting import until


@pytest.mark.long("it starts a whole server and an engine more")
def test_the_next_engine_names_the_adapter_and_serves_all_others(tmp_path, record_property):
    with serving(tmp_path) as server:
        config = good_adapter(server.acme.root / "mine") / "adapter_config.json"
        assert server.acme.put("acme-mine", "mine").status_code == 200
        config.write_text(json.dumps(json.loads(config.read_text()) | {"target_modules": BOMB}))
        (engine,) = server.boss.client.get("/server_info").json()["replicas"]
        os.kill(engine["pid"], signal.SIGKILL)
        assert until(lambda: server.birds.ask("pirate").status_code == 200), "no other engine came"

        with neighbour(server) as gaps:
            refused = server.acme.ask("acme-mine")
        record_property("gaps", str(gaps))
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "adapter_changed")
        assert "'acme-mine' changed since version 1 was loaded" in refused.json()["error"]["message"]
        assert not gaps.problems
        info = server.boss.client.get("/server_info").json()
        assert (len(info["replicas"]), info["quarantine"]["adapters"]) == (1, []), "no engine died of it"
        assert server.birds.ask("pirate").status_code == 200
