"""The script that measures registered adapters counts the records of both processes, which stay below two kilobytes."""

from __future__ import annotations

import os
import time
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ADAPTERS = 1000
MOST_BYTES = 2000


@pytest.fixture
def script() -> ModuleType:
    import registered_adapters

    return registered_adapters


def test_the_records_of_an_adapter_take_less_than_two_kilobytes_in_both_processes(script):
    assert script.server_bytes(ADAPTERS) + script.scheduler_bytes(ADAPTERS) < MOST_BYTES


def test_replicas_add_little_to_what_the_server_keeps(script):
    assert script.replicas_bytes(ADAPTERS, 8) + script.scheduler_bytes(ADAPTERS) < MOST_BYTES


def test_bytes_are_those_of_one_adapter_more_and_seconds_are_both(script):
    few = {"ready_s": 6.0, "server_bytes": 1000.0, "engine_bytes": 5000.0}
    many = {"ready_s": 6.1, "server_bytes": 11000.0, "engine_bytes": 10000.0}
    slow = {name: 9.0 * value for name, value in few.items()}

    assert script.compared([(few, many), (slow, many), (few, many)], more=10) == {
        "bytes_per_adapter": {"server_bytes": 1000, "engine_bytes": 500, "both": 1500},
        "ready_s": {"few": 6.0, "many": 6.1},
    }


def test_a_file_of_flags_names_folders_that_are_there(script, tmp_path):
    flags = tomllib.loads(script.write_config(tmp_path, 3).read_text())
    assert [sorted(path.name for path in Path(folder).iterdir()) for folder in flags["lora_paths"]] == [
        ["adapter_config.json", "adapter_model.safetensors"]
    ] * 3


def test_the_system_tells_of_this_process(script):
    assert script.cpu_of(os.getpid()) == pytest.approx(time.process_time(), abs=1.0)
    assert script.memory_of(os.getpid()) > 10_000_000


@pytest.mark.long("two servers start")
def test_a_whole_run_is_measured(script, tmp_path):
    report = script.measure(tmp_path, adapters=600, repeats=1)
    assert report["bytes_per_adapter"].keys() == {"server_bytes", "engine_bytes", "both"}
    assert all(each > 0 for each in report["engine_began_s"].values())
