"""Attacks 1 to 3: patterns without an end, also in a config that was good before, and swollen files."""

from __future__ import annotations

import json
import os
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.attacks.live import BOMB, WEIGHTS, good_adapter, memory_mb, neighbour, serving, with_config
from tests.waiting import until

# Attack 1: an adapter whose patterns never end to be matched.

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


# Attack 2: a good folder is loaded, its config becomes a pattern without an end, and the engine is started again.


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


# Attack 3: headers and configs that are endless, deep, or full of digits.

CONFIG = "adapter_config.json"
# What both processes may take more than before: files are read a piece at a time, and judged by their lengths first.
MOST_GROWTH_MB = 150


def with_header(header: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header)

    return write


def many_digits() -> bytes:
    shape = b"[" + b",".join([b"9" * 4000] * 3800) + b"]"
    return b'{"a": {"dtype": "F32", "shape": ' + shape + b', "data_offsets": [0, 4]}}'


def sparse(folder: Path) -> None:
    os.truncate(folder / CONFIG, 2 << 30)


def deep(folder: Path) -> None:
    (folder / CONFIG).write_text("[" * 100_000 + "]" * 100_000)


SWOLLEN: dict[str, Callable[[Path], None]] = {
    "digits": with_header(many_digits()),
    **{f"braces-{number}": with_header(b"[" + b",".join([b"{}"] * (5 << 20)) + b"]") for number in range(4)},
    "sparse": sparse,
    "deep": deep,
}


@pytest.mark.long("it starts a whole server, and sends it 80 MB")
def test_a_swollen_file_is_refused_by_its_size_and_nobody_notices(tmp_path, record_property):
    with serving(tmp_path) as server:
        for name, swell in SWOLLEN.items():
            swell(good_adapter(server.acme.root / name))
        pids = [server.program.pid, server.boss.client.get("/server_info").json()["replicas"][0]["pid"]]
        before = sum(map(memory_mb, pids))
        with neighbour(server) as gaps:
            answers = {name: server.acme.put(f"acme-{name}", name) for name in SWOLLEN}
        grown = sum(map(memory_mb, pids)) - before
        record_property("gaps", f"{gaps}; {grown:.0f} MB more")
        for name, answer in answers.items():
            assert answer.status_code == 400, (name, answer.text)
        assert not gaps.problems
        assert grown < MOST_GROWTH_MB, grown
        assert server.boss.client.get("/server_info").json()["replicas"][0]["pid"] == pids[1], "no engine died"
        assert "Traceback" not in server.log.read_text()
