"""Attack 3: headers and configs that are endless, deep, or full of digits."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.attacks.live import WEIGHTS, good_adapter, neighbour, serving
from tests.attacks.test_fuzzed_folders import memory_mb

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
