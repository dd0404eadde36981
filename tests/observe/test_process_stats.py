from __future__ import annotations

import json
import os
import sys

from rota.observe.metrics import Metrics
from rota.observe.snapshot import process_stats
from tests.observe.scraped import scrape
from tests.processes import run_program, started

# In a process of its own: in this one, threads of other tests come and go.
SCRIPT = """
import json, os, resource, threading, time
from dataclasses import asdict
from rota.observe.snapshot import process_stats
before = process_stats(os.getpid())
with open(os.devnull):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    after = process_stats(os.getpid())
limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
print(json.dumps([asdict(before), asdict(after), limit, time.time()]))
"""


def test_a_process_is_told_as_linux_counts_it():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    before, after, limit, now = json.loads(run_program([sys.executable, "-c", SCRIPT], env=environment).stdout)

    assert after["open_fds"] == before["open_fds"] + 1
    assert after["threads"] == before["threads"] + 1
    assert after["max_fds"] == limit
    assert after["cpu_s"] >= before["cpu_s"] >= 0.0
    assert after["resident_bytes"] > 2**20
    assert now - 3600 < before["started_at"] == after["started_at"] <= now + 1


def test_a_process_that_is_not_there_has_no_numbers(tmp_path):
    with started(["true"]) as program:
        program.wait()

    assert process_stats(program.pid) is None
    assert process_stats(None) is None
    assert process_stats(os.getpid(), proc=tmp_path) is None


NAMES = ("cpu_seconds_total", "resident_memory_bytes", "open_fds", "max_fds", "threads", "start_time_seconds")


def test_server_and_engine_are_told_apart():
    with started(["sleep", "3600"]) as engine:
        told = scrape(Metrics(lambda _: None), engine_pid=engine.pid)

    assert all(told(f"process_{name}") is not None for name in NAMES)
    assert all(told(f"rota_engine_process_{name}", engine="0") is not None for name in NAMES)
    assert told("process_threads") >= 1
    assert told("rota_engine_process_threads", engine="0") == 1


def test_an_engine_without_a_process_of_its_own_has_no_such_series():
    told = scrape(Metrics(lambda _: None))

    assert [told(f"rota_engine_process_{name}", engine="0") for name in NAMES] == [None] * len(NAMES)
