"""A fuzz of adapter folders through every way to load one: nothing fails, dies or grows but the number of refusals."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import httpx
import pytest

from tests.attacks.folders import Folder, spoiled
from tests.attacks.live import Server, neighbour, serving

# What both processes may grow by while most folders are refused: copies of those that were taken come and go.
MOST_GROWTH_MB = 200


def memory_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def load(server: Server, folder: Folder, way: int) -> httpx.Response:
    client, name = server.acme.client, "acme-fuzz"
    if way == 0:
        return server.acme.put(name, folder.path.name)
    if way == 1:
        body = {"lora_name": name, "lora_path": folder.path.name, "load_inplace": True}
        return client.post("/v1/load_lora_adapter", json=body)
    return client.put(
        f"/v1/adapters/{name}",
        params={"config": folder.config[:4000].decode("utf-8", "replace")},
        content=folder.weights,
        headers={"content-type": "application/octet-stream"},
    )


@pytest.mark.parametrize(
    ("folders", "watched"),
    [
        (200, 0),
        pytest.param(10_000, 500, marks=[pytest.mark.long("it loads ten thousand folders"), pytest.mark.timeout(3600)]),
    ],
)
def test_no_folder_does_more_than_to_be_refused(tmp_path, folders, watched, record_property):
    """A neighbour streams beside the first folders; the others are quicker without."""
    statuses: Counter[int] = Counter()
    with serving(tmp_path) as server:
        pids = [server.program.pid, server.boss.client.get("/server_info").json()["replicas"][0]["pid"]]

        def load_some(seeds: range) -> float:
            for seed in seeds:
                random = Random(seed)
                folder = spoiled(server.acme.root / "fuzz", random)
                answer = load(server, folder, random.randrange(3))
                statuses[answer.status_code] += 1
                assert answer.status_code < 500 or answer.status_code == 507, (seed, answer.text)
                assert "Traceback" not in answer.text, seed
            return sum(map(memory_mb, pids))

        if watched:
            with neighbour(server) as gaps:
                load_some(range(watched))
            record_property("gaps", str(gaps))
            assert not gaps.problems
        half, whole = load_some(range(watched, folders // 2)), load_some(range(folders // 2, folders))
        record_property("statuses", f"{statuses}, {half:.0f} MB in the middle, {whole:.0f} MB at the end")
        assert statuses[200] > folders / 50, f"good folders are among them: {statuses}"
        assert statuses[400] > folders / 4, statuses
        assert server.boss.client.get("/server_info").json()["replicas"][0]["pid"] == pids[1], "no engine died"
        assert whole - half < MOST_GROWTH_MB, (half, whole)
        assert "Traceback" not in server.log.read_text()
        assert server.birds.ask("pirate").status_code == 200
